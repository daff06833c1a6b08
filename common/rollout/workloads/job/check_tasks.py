"""Checks task directories before anything runs: every fault and warning of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rollout.model.errors import ConfigError
from rollout.model.problems import faults_of
from rollout.workloads.job.dialect import DialectName, unsettled
from rollout.workloads.job.load_task import LoadedTask, TaskUse, load_task
from rollout.workloads.job.names import portable_name, same_name
from rollout.workloads.job.task_directory import CONFIG
from rollout.workloads.job.task_review import review
from rollout.workloads.json_form import JsonObject

_MARKS = (CONFIG, "instruction.md")
_PARTS = ("environment", "tests")


@dataclass(frozen=True, slots=True)
class CheckedTask:
    """A checked task. `loaded` is None if it has `faults`."""

    directory: Path
    loaded: LoadedTask | None
    faults: tuple[str, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> JsonObject:
        """Return an object of `rollout task check --json`."""
        loaded = self.loaded
        task = None if loaded is None else loaded.task
        return {
            "name": self.directory.resolve().name,
            "directory": str(self.directory),
            "ok": not self.faults,
            "format": task and task.dialect_name,
            "schema_version": task and task.schema_version,
            "steps": task and len(task.steps),
            "checksum": task and task.checksum,
            "files": loaded and loaded.count,
            "size": loaded and loaded.size,
            "faults": list(self.faults),
            "warnings": list(self.warnings),
        }


def check_tasks(
    paths: Sequence[Path], environ: Mapping[str, str], dialect: DialectName | None = None
) -> Iterator[CheckedTask]:
    """Yield each task of `paths`, which are tasks or directories of tasks. What concerns a whole directory of tasks is
    yielded separately, with faults or warnings and no task. `dialect` is that of `load_task`."""
    for path in paths:
        if is_task(path):
            checked = _checked(path, environ, dialect)
            yield replace(checked, faults=(*checked.faults, *_unsettled(path, [checked])))
        else:
            yield from _below(path, environ, dialect)


def is_task(path: Path) -> bool:
    """Return whether `path` is meant as a task rather than a directory of tasks."""
    return any((path / mark).exists() for mark in _MARKS)


def _checked(path: Path, environ: Mapping[str, str], dialect: DialectName | None) -> CheckedTask:
    faults: list[str] = []
    try:
        portable_name(path.resolve().name)
    except ValueError as error:
        faults.append(f"{path}: {error}")
    try:
        loaded = load_task(path, TaskUse(), dialect=dialect)
    except ConfigError as error:
        return CheckedTask(path, None, (*faults, *faults_of(error.message)), ())
    return CheckedTask(path, None if faults else loaded, tuple(faults), (*loaded.notes, *review(loaded.task, environ)))


def _below(path: Path, environ: Mapping[str, str], dialect: DialectName | None) -> Iterator[CheckedTask]:
    try:
        entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith(".") and entry.is_dir())
    except OSError as error:
        why = "no such directory" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        why = "a file; a task is a directory" if isinstance(error, NotADirectoryError) else why
        yield CheckedTask(path, None, (f"{path}: {why}",), ())
        return
    tasks = [entry for entry in entries if is_task(entry)]
    found = list[CheckedTask]()
    for task in tasks:
        found.append(_checked(task, environ, dialect))
        yield found[-1]
    faults, seen = list[str](), dict[str, Path]()
    for task in tasks:
        other = seen.setdefault(same_name(task.name), task)
        if other is not task:
            faults.append(f"{path}: {other.name} and {task.name} are one name to some file systems: rename one")
    if not tasks:
        faults.append(f"{path}: neither a task nor a directory of tasks: there is no {CONFIG} in it or one level below")
    warnings = [
        f"{entry}: looks like a task, and has no {CONFIG} and no instruction.md: it is not taken for one"
        for entry in entries
        if entry not in tasks and all((entry / part).is_dir() for part in _PARTS)
    ]
    faults += _unsettled(path, found)
    if faults or warnings:
        yield CheckedTask(path, None, tuple(faults), tuple(warnings))


def _unsettled(path: Path, tasks: Sequence[CheckedTask]) -> list[str]:
    """Return one fault for all `tasks` that do not name their format."""
    names = [task.directory.name for task in tasks if task.loaded and not task.loaded.settled]
    return [unsettled(str(path), len(names), names[0])] if names else []
