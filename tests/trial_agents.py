"""An agent of another package, for tests of trials: it does what its kwargs say."""

from __future__ import annotations

import asyncio

from rollout_worker.trials.port import Agent, Place, TrialFault


class Obedient(Agent):
    """Counts tokens, then raises, hangs in code of its own, or passes; `once`: only the first one made does so."""

    version = "1.2"
    made = 0

    def __init__(
        self, *, raises: str = "", retry_after_s: float | None = None, hangs: bool = False, once: bool = False
    ):
        type(self).made += 1
        self._acts = not once or type(self).made == 1
        self._raises, self._retry_after_s, self._hangs = raises, retry_after_s, hangs

    async def install(self, place: Place) -> None: ...

    async def execute(self, place: Place, instruction: str) -> None:
        place.usage.input_tokens += 100
        place.usage.output_tokens += 10
        place.usage.cost_usd = 0.25
        place.note("counted")
        await place.run("date +%s.%N > /logs/artifacts/began")
        if not self._acts:
            return
        if self._hangs:
            await asyncio.Event().wait()
        if self._raises == "RuntimeError":
            raise RuntimeError("as any code may")
        if self._raises:
            raise TrialFault(self._raises, "it was told to", retry_after_s=self._retry_after_s)
