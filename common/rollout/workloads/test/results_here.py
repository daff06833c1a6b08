"""Results of earlier runs, as they are in the output directory of a project."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rollout.model.errors import InputError
from rollout.workloads.output import RUN_ID, claimed, saved_state, saved_summary
from rollout.workloads.test.result_lines import RESULTS, read_lines


@dataclass(frozen=True, slots=True)
class Failed:
    """`ids`: of tests, and of files that could not be collected. `files`: where they are."""

    ids: frozenset[str]
    files: tuple[str, ...]


def results_file(directory: Path, run: str | None) -> Path:
    """Of the last run of `directory`, or of one that is called `run`. InputError: there is none."""
    last = directory / RESULTS
    if run is None:
        if not last.exists():
            raise InputError(f"there are no results in {directory}: `rollout test run` makes some")
        return last
    wanted = run.upper()
    names = {path.name.split(".")[1]: path for path in directory.glob(f"{last.stem}.*{last.suffix}")}
    if (state := saved_state(directory)) is not None:
        names[state["run_id"]] = last
    found = [path for name, path in names.items() if wanted and (name.startswith(wanted) or name.endswith(wanted))]
    if len(found) != 1:
        known = ", ".join(name[-8:] for name in sorted(names, reverse=True))
        what = "no run" if not found else "more than one run"
        raise InputError(f"{what} in {directory} is called {run}: there are {known or 'none'}")
    return found[0]


def unfinished(directory: Path) -> Failed | None:
    """What a run of failed tests was to run that was killed; None: there is none."""
    known = claimed(directory)
    if known is None or run_of(directory) != known["run_id"] or is_over(directory) or not known["kept"].get("only"):
        return None
    return Failed(frozenset(known["kept"]["only"]), tuple(known["kept"]["selected"]))


def is_over(directory: Path) -> bool:
    """Whether the run of `directory` has ended, and all of it is in the files."""
    state = saved_state(directory)
    summary = saved_summary(directory, state) if state is not None else None
    return summary is not None and run_of(directory) == summary["run_id"]


def run_of(directory: Path) -> str:
    """The run of `directory`; empty: none."""
    try:
        return (directory / RUN_ID).read_text("ascii", "replace").strip()
    except OSError:
        return ""


def failed_ids(path: Path) -> Failed:
    """Of the tests that failed the run."""
    failing = [line for line in read_lines(path) if line.fails]
    return Failed(
        frozenset(line.case.id for line in failing),
        tuple(dict.fromkeys(line.case.file or line.case.id for line in failing)),
    )
