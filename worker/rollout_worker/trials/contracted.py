"""What the contracts of an experiment add to a trial."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rollout.workloads.experiment.contracts import TrialInput


@dataclass(slots=True)
class Contracted:
    """One per trial. `files` is the directory of the trial's files. `predecessor` has the files of the trial in whose
    workspace this one starts, or None if it starts with the task's own.

    The agent sets `wants_result` if it leaves a result, and `exit_status` when its command has ended by itself.
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
