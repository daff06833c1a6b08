"""The condition of a run according to its files; no cluster is asked."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollout.client.private import state_of
from rollout.model.errors import StorageError
from rollout.workloads.experiment.commands.find_run import Found
from rollout.workloads.experiment.contracts import RunControl
from rollout.workloads.experiment.control import read_control
from rollout.workloads.experiment.layout import TRIALS
from rollout.workloads.output import changed_files, holder_of

_PIECE = 1 << 20
_ALIVE = ("running", "paused")


@dataclass(frozen=True, slots=True)
class Condition:
    """`committed` counts trials with facts, including those inherited from another run. `damaged` has a line for each
    file that was changed. `held_by` is the command that uses the run now, as `holder_of` returns it."""

    directory: Path
    control: RunControl | None
    committed: int
    inherited: int
    damaged: list[str]
    held_by: str

    @property
    def collected(self) -> int:
        """Number of the run's own trials with facts."""
        return self.committed - self.inherited

    @property
    def status(self) -> str:
        """The state. A run on this machine alone is running only while a command uses it, whatever the control file
        says."""
        if self.control is None:
            return "running" if self.held_by else "not begun"
        alone = not self.held_by and state_of(self.directory) is not None
        return "interrupted" if alone and self.control.status in _ALIVE else self.control.status

    @property
    def going_on(self) -> str:
        return going_on(self.directory)

    @property
    def advice(self) -> Iterator[str]:
        yield from self.damaged
        if self.held_by:
            yield f"a command works at it: {self.held_by}"
        elif self.damaged:
            yield f"write the files anew from the ledger with: {self.going_on}"
        elif self.status != "completed":
            yield f"go on with: {self.going_on}"


def going_on(directory: Path) -> str:
    """Return the command that continues a run, even a killed one."""
    return f"rollout experiment continue {shlex.quote(str(directory))}"


def condition_of(found: Found) -> Condition:
    """Return the condition. Raises ConfigError if the control file is damaged, StorageError if a file cannot be read.
    Blocking."""
    inherited = found.config.get("inherited")
    try:
        return Condition(
            directory=found.directory,
            control=read_control(found.directory),
            committed=_lines(found.directory / TRIALS),
            inherited=0 if inherited is None else inherited["slots"],
            damaged=changed_files(found.directory),
            held_by=holder_of(found.directory),
        )
    except OSError as error:
        raise StorageError(f"{found.directory}: {error.strerror or error}") from error


def _lines(path: Path) -> int:
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        return sum(piece.count(b"\n") for piece in iter(lambda: file.read(_PIECE), b""))
