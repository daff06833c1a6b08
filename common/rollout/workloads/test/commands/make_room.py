"""Moves the files of a finished run aside, so that the next one can use the directory."""

from __future__ import annotations

import shutil
from pathlib import Path

from rollout.client.private import STATE_DIR, OwnerLock
from rollout.model.ids import is_ulid
from rollout.workloads.output import OutputDirectory
from rollout.workloads.test.lines import FILES
from rollout.workloads.test.results_here import aside, is_over

KEPT = 10
"""Number of earlier runs whose files are kept."""


def make_room(directory: Path) -> None:
    """Make room in the directory of a finished run: delete the state of its private cluster, and let the next run move
    its files aside, keeping the newest. Raises StateError if another command uses the directory."""
    if not is_over(directory):
        return
    with OutputDirectory.open(directory) as output:
        if not is_over(directory):
            return
        lock = OwnerLock(directory / STATE_DIR)
        if lock.try_acquire():
            shutil.rmtree(directory / STATE_DIR, ignore_errors=True)
            lock.release()
        for run_id in sorted(_aside(directory))[: 1 - KEPT]:
            for name in FILES:
                aside(directory, name, run_id).unlink(missing_ok=True)
        output.leave()


def refuse_in_use(directory: Path) -> None:
    """Raise StateError if another command uses the directory."""
    if directory.is_dir():
        with OutputDirectory.open(directory):
            pass


def _aside(directory: Path) -> set[str]:
    """Return the runs whose files were moved aside."""
    names = (path.name.split(".") for path in directory.iterdir())
    return {parts[1] for parts in names if len(parts) == 3 and is_ulid(parts[1])}
