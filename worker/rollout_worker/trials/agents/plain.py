"""Agents without a model: bash that the job brings, and one that does nothing."""

from __future__ import annotations

from rollout_worker.trials.port import Agent, Place, TrialFault


class BashAgent(Agent):
    """`install` and `execute` of the job, each given to bash on its standard input's place: as a script file."""

    version = ""

    def __init__(self, install: str, execute: str) -> None:
        self._install = install
        self._execute = execute

    async def install(self, place: Place) -> None:
        if self._install:
            await _run(place, self._install, "install", "agent_install_failed")

    async def execute(self, place: Place, instruction: str) -> None:
        await _run(place, self._execute, "execute", "agent_execution_failed")


class NopAgent(Agent):
    version = ""

    async def install(self, place: Place) -> None: ...

    async def execute(self, place: Place, instruction: str) -> None: ...


async def _run(place: Place, script: str, name: str, fault: str) -> None:
    finished = await place.run(["bash", "-c", script, name])
    if not finished.ok:
        how = f"exit code {finished.exit_code}" if finished.how == "exited" else f"{finished.how}"
        last = (finished.stderr.text().strip() or finished.stdout.text().strip())[-500:]
        raise TrialFault(fault, f"{name} ended with {how}" + (f": {last}" if last else ""))
