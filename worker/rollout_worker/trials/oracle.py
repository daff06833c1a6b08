"""The agent that runs a task's own solution, which a task must accept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rollout_worker.trials.agents.plain import check, script
from rollout_worker.trials.port import Agent, Place, TrialFault

SOLVE = "solve.sh"


class Oracle(Agent):
    """Copies the solution to the sandbox just before running it. `solution` is that of the next step."""

    version = ""

    def __init__(self, mount: str, env: Mapping[str, str]) -> None:
        self.mount = mount
        self.solution: Path | None = None
        self._env = env

    async def install(self, place: Place) -> None: ...

    async def execute(self, place: Place, instruction: str) -> None:
        if self.solution is None or not (self.solution / SOLVE).is_file():
            raise TrialFault("task_invalid", f"there is no {SOLVE} for the agent oracle to run")
        await place.sandbox.upload(self.solution, self.mount)
        check(await place.run(script(f"{self.mount}/{SOLVE}"), env=self._env), SOLVE, "agent_execution_failed")
