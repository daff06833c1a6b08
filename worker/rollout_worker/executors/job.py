"""Executor of trials. Its parts are imported when a run has trials, because each worker imports this module at its
start."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from blake3 import blake3
from rollout.workloads.json_form import canonical

from rollout_worker.executors.port import Attempt, Context, Done, Run

if TYPE_CHECKING:
    from rollout_worker.executors.job_trials import JobTrials


class JobExecutor:
    placement: ClassVar[Literal["engine", "shared", "slot"]] = "shared"

    def __init__(self) -> None:
        self._trials: JobTrials | None = None

    @property
    def concurrency(self) -> int:
        return self._trials.concurrency if self._trials else 1

    @classmethod
    def engine_key(cls, run: Run) -> str:
        """Return a key per run, because the process holds secrets that the run's trials may know."""
        return blake3(canonical(["job", run.run_id])).hexdigest()[:32]

    @classmethod
    def environment(cls, run: Run) -> dict[str, str]:
        return {}

    @classmethod
    def devices(cls, run: Run) -> int:
        return 0

    async def start(self, run: Run, context: Context) -> None:
        from rollout_worker.executors.job_trials import JobTrials

        self._trials = JobTrials()
        await self._trials.start(run, context)

    async def run(self, attempt: Attempt, context: Context) -> Done:
        assert self._trials is not None
        return await self._trials.run(attempt, context)

    async def close(self) -> None:
        if self._trials is not None:
            await self._trials.close()
