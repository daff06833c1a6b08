"""Messages about an interrupted command: what is safe, what continues, and how to resume."""

from __future__ import annotations

import shlex

from rollout.cli.collecting import CollectedRun
from rollout.cli.words import of_unit
from rollout.cli.work import Work
from rollout.model.ids import short
from rollout.workloads.output_place import OutputPlace


def interrupted_early(known: str, place: OutputPlace, command: str) -> list[str]:
    """Return the lines for a command that opened no run yet. `known` is the id of the run to resume, or empty."""
    said = f"interrupted before run {known} was asked for; what it has is safe"
    lines = [said, f"continue with: {command}"] if known else ["interrupted before anything was submitted"]
    return lines + _lock_left(place)


def interrupted(run: CollectedRun, work: Work, place: OutputPlace, command: str) -> list[str]:
    """Return the lines for an open run. `command` resumes it."""
    of_all = of_unit(run.total, work.workload.unit)
    lines = [
        f"interrupted: {run.written} are in {work.directory}; nothing is lost",
        *place.uploaded(run.committed, of_all),
        *_lock_left(place),
    ]
    if not work.is_private:
        run_id = short(run.run_id)
        submitted = "" if run.submitted >= run.total else f" ({run.submitted} of {of_all} are submitted)"
        how, stop = ("is paused", "") if run.finishing else ("goes on", f"; stop it with: rollout run pause {run_id}")
        lines.append(f"run {run_id} {how} at the cluster{submitted}{stop}")
    lines.append(f"continue with: {command}")
    if run.may_hang:
        lines.append(_how_to_end_a_row(run, work))
    return lines


def _how_to_end_a_row(run: CollectedRun, work: Work) -> str:
    limits = {key.removeprefix("run."): option for key, option in work.workload.changeable.items()}
    option = next(option for key, option in limits.items() if key.startswith("timeout"))
    of = short(run.run_id) + (f" --dir {shlex.quote(str(work.directory))}" if work.is_private else "")
    return (
        f"if a row hangs: that command with {option} sets a limit for all that have no result; rollout item cancel "
        f"{of} ROW ends a single one"
    )


def _lock_left(place: OutputPlace) -> list[str]:
    """Return the lines about the lock of a command that ends at once."""
    return [place.lock_text] if place.lock_text else []
