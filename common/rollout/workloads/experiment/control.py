"""runtime/: the progress of a run, in two files that others may read at any time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollout.model.errors import ConfigError, InputError
from rollout.workloads.experiment.contracts import (
    ActiveTrial,
    CompletedSlot,
    Pause,
    RunControl,
    ScheduleProgress,
    Slot,
    SlotStatus,
)
from rollout.workloads.experiment.layout import CONTROL, PROGRESS
from rollout.workloads.experiment.schedule import trial_id
from rollout.workloads.json_form import dump_line, timestamp
from rollout.workloads.output import write_atomically
from rollout.workloads.port import Running

_STATUS = {"": "running", "pausing": "paused"}


@dataclass(slots=True)
class Progress:
    """The progress of a run. `statuses` are those of committed slots in the order of the schedule, from slot `first`
    on; those before are not part of the run. `seq_from` is the slot of its first item."""

    run_id: str
    variants: Sequence[str]
    schedule: Sequence[Slot]
    use_container: bool
    first: int = 0
    seq_from: int = 0
    statuses: list[SlotStatus] = field(default_factory=list[SlotStatus])
    consecutive: dict[int, int] = field(default_factory=dict[int, int])
    running: Sequence[Running] = ()
    state: str = "running"
    pause: Pause | None = None

    @property
    def committed(self) -> int:
        """The first slot that is not committed."""
        return self.first + len(self.statuses)

    def slot_of(self, seq: int) -> int:
        """Return the slot of an item."""
        return self.seq_from + seq

    def commit(self, status: SlotStatus) -> None:
        variant = self.schedule[self.committed].variant_idx
        self.statuses.append(status)
        if status == "failed":
            self.consecutive[variant] = self.consecutive.get(variant, 0) + 1
        elif status == "completed":
            self.consecutive[variant] = 0

    def watch(self, state: str, reason: str) -> None:
        if state == "paused" and self.pause is None:
            self.pause = Pause(label=reason, requested_at=_now())
        elif state != "paused":
            self.pause = None
        self.state = state

    def control(self) -> RunControl:
        """Return run_control_v2."""
        ended = self.state in ("completed", "failed", "killed")
        active = {
            trial_id(index): ActiveTrial(
                worker_id=one.worker,
                schedule_idx=index,
                variant_id=self.variants[self.schedule[index].variant_idx],
                started_at=timestamp(round((time.time() - one.seconds) * 1000)),
                control={"phase": one.note, "try": one.tries},
            )
            for index, one in self._running()
            if not ended and self.committed <= index < len(self.schedule)
        }
        return RunControl.of(
            {
                "run_id": self.run_id,
                "status": _STATUS.get(self.state, self.state),
                "active_trials": {name: one.to_json() for name, one in active.items()},
                "pause": None if self.pause is None else self.pause.to_json(),
                "updated_at": _now(),
            }
        )

    def progress(self) -> ScheduleProgress:
        """Return schedule_progress_v1. The next slot to start comes after all that have started."""
        following = max([self.committed, *(index + 1 for index, _ in self._running())])
        statuses = list(enumerate(self.statuses, self.first))
        pruned = {self.schedule[index].variant_idx for index, one in statuses if one == "skipped_pruned"}
        return ScheduleProgress(
            run_id=self.run_id,
            total_slots=len(self.schedule),
            next_schedule_index=following,
            next_trial_index=following + 1,
            schedule=list(self.schedule),
            completed_slots=[
                CompletedSlot.model_construct(schedule_index=index, trial_id=trial_id(index), status=status)
                for index, status in statuses
            ],
            pruned_variants=sorted(pruned),
            consecutive_failures={str(variant): count for variant, count in sorted(self.consecutive.items())},
            use_container=self.use_container,
        )

    def _running(self) -> list[tuple[int, Running]]:
        return [(self.slot_of(one.seq), one) for one in self.running]

    def write(self, directory: Path) -> None:
        """Write both files. Blocking."""
        write_atomically(directory / CONTROL, self.control().encode())
        write_atomically(directory / PROGRESS, dump_line(self.progress().to_json()))


def read_control(directory: Path) -> RunControl | None:
    """Read the control file, or return None if it does not exist yet. Raises ConfigError if it is damaged."""
    path = directory / CONTROL
    try:
        return RunControl.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, InputError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'message', error)}") from error


def _now() -> str:
    return timestamp(round(time.time() * 1000))
