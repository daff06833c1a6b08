"""The agents that are scripts: a task's own solution, bash of a job file, and one that does nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rollout_worker.sandboxes.port import Finished
from rollout_worker.trials.faults import faults
from rollout_worker.trials.port import Place, TrialFault

_WITH_BASH = 'if command -v bash >/dev/null 2>&1; then exec bash "$0"; else exec sh "$0"; fi'


def script(path: str) -> list[str]:
    """The command that runs a script of bash, or of sh where there is no bash."""
    return ["/bin/sh", "-c", _WITH_BASH, path]


class Nop:
    version = ""

    async def install(self, place: Place) -> None:
        pass

    async def execute(self, place: Place, instruction: str) -> None:
        pass


class Oracle:
    """Runs the solution, which is put into the sandbox just before."""

    version = ""

    def __init__(self, mount: str, env: Mapping[str, str]) -> None:
        self.solution: Path | None = None  # of the step to come
        self.mount = mount
        self._env = env

    async def install(self, place: Place) -> None:
        pass

    async def execute(self, place: Place, instruction: str) -> None:
        if self.solution is None or not (self.solution / "solve.sh").is_file():
            raise TrialFault("task_invalid", "there is no solve.sh for the agent oracle to run")
        with faults("environment_lost", "the solution was copied"):
            await place.sandbox.upload(self.solution, self.mount)
        finished = await place.run(script(f"{self.mount}/solve.sh"), env=self._env)
        _check(finished, "solve.sh", "agent_execution_failed")


class Bash:
    """`install` and `execute` of a section of the job file."""

    version = ""
    _INSTALL, _EXECUTE = "/tmp/rollout-install.sh", "/tmp/rollout-execute.sh"

    def __init__(self, install: str, execute: str) -> None:
        self._scripts = {self._INSTALL: install, self._EXECUTE: execute}

    async def install(self, place: Place) -> None:
        if self._scripts[self._INSTALL].strip():
            await self._run(place, self._INSTALL, "agent_install_failed")

    async def execute(self, place: Place, instruction: str) -> None:
        await self._run(place, self._EXECUTE, "agent_execution_failed")

    async def _run(self, place: Place, path: str, type: str) -> None:
        with faults(type, "the agent's script was copied"):
            await place.sandbox.write_file(path, self._scripts[path].encode(), mode=0o755)
        _check(await place.run(script(path)), path.rpartition("-")[2], type)


def _check(finished: Finished, what: str, type: str) -> None:
    if finished.ok:
        return
    ending = (
        f"ended with exit code {finished.exit_code}"
        if finished.how == "exited"
        else f"was ended by signal {finished.signal}"
    )
    if finished.limit:
        ending += f" (the sandbox's {finished.limit} limit was hit)"
    last = finished.stderr.text()[-500:].strip() or finished.stdout.text()[-500:].strip()
    raise TrialFault(type, f"{what} {ending}" + (f": {last}" if last else ""))
