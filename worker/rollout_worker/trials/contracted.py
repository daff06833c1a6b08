"""What the contracts of an experiment add to a trial."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rollout.workloads.experiment.contracts import TrialInput


@dataclass(slots=True)
class Contracted:
    """One a trial. `files`: the directory of the trial's files. `predecessor`: the files of the trial whose workspace
    this one begins with; None: it begins with the task's own.

    The agent says `wants_result` where it leaves a result, and `exit_status` when its command has ended by itself.
    """

    input: TrialInput
    files: Path
    predecessor: Path | None = None
    wants_result: bool = False
    exit_status: int | None = None

    @property
    def grader_env(self) -> dict[str, str]:
        ids = self.input.ids
        return {"AGENTLAB_TASK_ID": ids.task_id, "AGENTLAB_VARIANT_ID": ids.variant_id}
