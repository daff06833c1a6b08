"""Runs tests of frameworks that are a command for each batch (`Framework.command`), and reads what it came to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from uuid import uuid4

from rollout.workloads.test.cases import Batch, Outcome, Try
from rollout.workloads.test.frameworks.port import Ended, Framework
from rollout.workloads.test.run_config import GroupConfig

from rollout_worker.testing.frames import Kept
from rollout_worker.testing.host import Doing
from rollout_worker.testing.place import Place, Stream

GRACE_S = 10.0
"""Frameworks that keep a limit themselves can say where a test hung: ours is later."""


class CommandHost:
    """One batch at a time, as a `Host` does it: a test that ends or hangs its command costs itself."""

    def __init__(self, place: Place, framework: Framework, group: str, config: GroupConfig) -> None:
        self._place = place
        self._framework = framework
        self._group = group
        self._config = config
        self._turn = asyncio.Lock()

    async def run(self, ids: Sequence[str], limit_s: float, doing: Callable[[Doing], None]) -> dict[str, Try]:
        """A try at each of the tests. Cancelled, it ends its command."""
        async with self._turn:
            tries: dict[str, Try] = {}
            now = Doing(len(ids))
            parts = [list(ids)]
            while parts:
                part = parts.pop(0)
                now.id, now.began = part[0], time.monotonic()
                doing(now)
                made, ended = await self._run(part, limit_s)
                tries |= made
                now.done = len(tries)
                left = [one for one in part if one not in tries]
                if left and len(part) == 1:
                    tries[part[0]] = _lost(ended)
                elif left and ended.code is None:  # one of these hangs
                    half = (len(left) + 1) // 2
                    parts[:0] = [left[:half], left[half:]] if half < len(left) else [left]
                elif left:
                    parts[:0] = [left] if made else [[one] for one in left]
            now.id = ""
            doing(now)
            return tries

    async def _run(self, ids: Sequence[str], limit_s: float) -> tuple[dict[str, Try], Ended]:
        batch = Batch(group=self._group, ids=tuple(ids), limit_s=limit_s)
        said: dict[Stream, Kept] = {"stdout": Kept(), "stderr": Kept()}
        async with self._place.directory() as directory:
            command = self._framework.command(batch, self._config, directory.name)
            began = time.time()
            try:
                process = await self._place.start(command.words, lambda stream, data: said[stream].add(data))
            except OSError as error:
                why = f"{command.words[0]} cannot be run: {error.strerror or error}"
                return {one: Try(outcome=Outcome.ERROR, message=why, started=began) for one in ids}, Ended(1)
            process.close_input()
            code: int | None = None
            try:
                async with asyncio.timeout(command.limit_s + GRACE_S if command.limit_s else None):
                    code = await process.exit_code()
            except TimeoutError:
                await process.kill()
            except asyncio.CancelledError:
                await process.kill()
                raise
            ended = Ended(code, said["stdout"].text(), said["stderr"].text())
            found = await asyncio.to_thread(
                self._framework.results, batch, self._config, await directory.bring(), ended
            )  # fmt: skip
        name = uuid4().hex[:8]
        # Tests of one command ran one after the other, which not every framework has times of.
        at = {"process": name}
        return {
            one.id: one.tries[-1].model_copy(update=at if one.tries[-1].started else {**at, "started": began})
            for one in found.cases
        }, ended

    async def close(self) -> str:
        return ""


def _lost(ended: Ended) -> Try:
    if ended.code is None:
        outcome, message = Outcome.TIMEOUT, "the test command was ended at its time limit"
    else:
        outcome, message = Outcome.ERROR, f"the test command ended with {ended.code}, and with no result of this test"
    return Try(outcome=outcome, message=message, stdout=ended.stdout, stderr=ended.stderr)
