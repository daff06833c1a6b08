"""Results of earlier runs in the output directory of a project."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rollout.model.errors import InputError
from rollout.workloads.json_form import JsonObject
from rollout.workloads.output import RUN_ID, claimed, saved_state, saved_summary
from rollout.workloads.test.result_lines import RESULTS, read_lines


@dataclass(frozen=True, slots=True)
class Failed:
    """`ids` are those of failed tests and of files that could not be collected. `files` are their paths."""

    ids: frozenset[str]
    files: tuple[str, ...]

    def and_also(self, other: Failed) -> Failed:
        return Failed(self.ids | other.ids, tuple(dict.fromkeys((*self.files, *other.files))))


def results_file(directory: Path, run: str | None) -> Path:
    """Return the results file of the last run of `directory`, or of `run`. Raises InputError if there is none."""
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
    """Return what a killed run of failed tests was meant to run, or None if there is no such run."""
    known = claimed(directory)
    if known is None or run_of(directory) != known["run_id"] or is_over(directory) or not known["kept"].get("only"):
        return None
    return Failed(frozenset(known["kept"]["only"]), tuple(known["kept"]["selected"]))


def is_over(directory: Path) -> bool:
    """Return whether the run of `directory` has ended and its files are complete."""
    state = saved_state(directory)
    summary = saved_summary(directory, state) if state is not None else None
    return summary is not None and run_of(directory) == summary["run_id"]


def run_of(directory: Path) -> str:
    """Return the run of `directory`, or ""."""
    try:
        return (directory / RUN_ID).read_text("ascii", "replace").strip()
    except OSError:
        return ""


def aside(directory: Path, name: str, run_id: str) -> Path:
    """Return the path of the file `name` of an earlier run."""
    path = directory / name
    return path.with_name(f"{path.stem}.{run_id}{path.suffix}")


def keep_aside(directory: Path, names: Iterable[str]) -> Path:
    """Copy the files of the run of `directory` before another run replaces it. Returns the new path of its results."""
    run_id = run_of(directory)
    for name in names:
        if (directory / name).exists():
            shutil.copyfile(directory / name, aside(directory, name, run_id))
    return aside(directory, RESULTS, run_id)


def not_run(directory: Path) -> Failed:
    """Return tests of the last run of `directory` that have no result."""
    known, state = claimed(directory), saved_state(directory)
    if known is None or state is None or known["run_id"] != state["run_id"] or "output" not in known["config"]:
        return Failed(frozenset(), ())
    config: JsonObject = known["config"]
    done = {f"{line.case.group}/{line.case.id}" for line in read_lines(directory / RESULTS)}
    left = {key: case for key, case in config["output"]["cases"].items() if key not in done}
    ids = {key.removeprefix(f"{group}/") for key in left for group in config["groups"] if key.startswith(f"{group}/")}
    return Failed(frozenset(ids), _selecting(case["file"] for case in left.values() if case["file"]))


def failed_ids(path: Path) -> Failed:
    """Return the tests that failed the run."""
    failing = [line for line in read_lines(path) if line.fails]
    return Failed(
        frozenset(line.case.id for line in failing),
        _selecting(line.case.file or line.case.id for line in failing),
    )


def _selecting(files: Iterable[str]) -> tuple[str, ...]:
    """Return arguments that select the files. Names that a framework would misread are replaced by their
    directories."""
    named = (str(PurePosixPath(file).parent) if "[" in file or "::" in file else file for file in files)
    return tuple(dict.fromkeys(f"./{name}" if name.startswith("-") else name for name in named))
