"""Loads a `Task` from its directory, finding all faults at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rollout.config.load import Located, validated
from rollout.config.locate import Place
from rollout.model.errors import ConfigError
from rollout.model.problems import faults_of, problems
from rollout.workloads.job.compose import check_compose
from rollout.workloads.job.dialect import DIALECTS, DialectName, settled_by, version_of
from rollout.workloads.job.task import ENVIRONMENT, TESTS, Task, resolve
from rollout.workloads.job.task_directory import CONFIG, SOLUTIONS, missing_files, scan
from rollout.workloads.job.task_toml import TaskToml
from rollout.workloads.job.templates import unset


@dataclass(frozen=True, slots=True)
class TaskUse:
    """How the job uses its tasks.

    `verify`: they are verified. `oracle`: their solutions run. `environ` provides variables; None means that they are
    set elsewhere and not checked. `strict`: unknown keys of task.toml are faults, as is right for files that the user
    can edit; otherwise they are listed in `LoadedTask.notes`.
    """

    verify: bool = True
    oracle: bool = False
    environ: Mapping[str, str] | None = None
    strict: bool = True


@dataclass(frozen=True, slots=True)
class LoadedTask:
    """`size` and `count` are bytes and files of the directory. `settled`: its files, or the caller, name its format;
    otherwise it is read as Rollout's."""

    task: Task
    notes: tuple[str, ...]
    size: int
    count: int
    settled: bool = True


def load_task(
    directory: Path,
    use: TaskUse = TaskUse(),
    *,
    name: str | None = None,
    dialect: DialectName | None = None,
    git_commit_id: str | None = None,
) -> LoadedTask:
    """Load the task in `directory`. Raises ConfigError with every fault, most as `file:line: key: what`.

    `name` replaces the directory's. `dialect` replaces the one that task.toml decides (`settled_by`).
    """
    if not directory.is_dir():
        what = "this is a file; a task is a directory" if directory.exists() else "there is no such directory"
        raise ConfigError(f"{directory}: {what}")
    faults, notes = list[str](), list[str]()
    source = _source(directory / CONFIG, faults)
    keys = None if source is None else _keys(source, use.strict, faults, notes)
    files = scan(directory)
    faults += files.faults
    if source is None or keys is None:
        raise ConfigError(problems(dict.fromkeys(faults)))
    settled = dialect or settled_by(keys.model_dump(exclude_unset=True))
    task = resolve(
        keys,
        name=name or directory.resolve().name,
        directory=directory,
        version=version_of(keys.version, keys.schema_version)[0],
        dialect=DIALECTS[settled or "rollout"],
        solution=next((one for one in SOLUTIONS if (directory / one).is_dir()), None),
    )
    if use.environ is not None:
        faults += unset(_environments(keys, use), use.environ, source.where)
    faults += missing_files(task, verify=use.verify, oracle=use.oracle)
    for built_from in (ENVIRONMENT, TESTS):
        of_compose = check_compose(directory / built_from)
        faults += of_compose[0]
        notes += of_compose[1]
    if faults:
        raise ConfigError(problems(dict.fromkeys(faults)))
    task = task.model_copy(update={"checksum": files.checksum, "git_commit_id": git_commit_id})
    return LoadedTask(task, tuple(notes), files.size, files.count, settled is not None)


def _source(path: Path, faults: list[str]) -> Located | None:
    """Read the file, or return None if it exists and is unreadable."""
    try:
        return Located.read(path)
    except ConfigError as error:
        faults += faults_of(error.message)
        return None if path.exists() else Located(str(path), {}, {})


def _keys(source: Located, strict: bool, faults: list[str], notes: list[str]) -> TaskToml | None:
    """Return the keys of `source`. If they are invalid, return those that say which files the task needs, or None if
    these are invalid, too."""
    try:
        return _validated(source, strict, notes)
    except ConfigError as error:
        faults += faults_of(error.message)
    try:
        usable = {key: source.values[key] for key in ("environment", "steps") if key in source.values}
        return TaskToml.model_validate(usable, strict=True)
    except ValidationError:
        return None


def _validated(source: Located, strict: bool, notes: list[str]) -> TaskToml:
    try:
        return validated(TaskToml, source)
    except ConfigError as error:
        cause = error.__cause__
        entries = cause.errors(include_url=False) if isinstance(cause, ValidationError) else []
        if strict or any(entry["type"] != "extra_forbidden" for entry in entries):
            raise
        for entry in entries:
            _remove(source.values, tuple(entry["loc"]))
        keys = validated(TaskToml, source)  # ConfigError: other faults beside the unknown keys
        notes += [f"{fault} (the key is not used)" for fault in faults_of(error.message)]
        return keys


def _remove(values: Any, place: Place) -> None:
    for key in place[:-1]:
        values = values[key]
    del values[place[-1]]


def _environments(keys: TaskToml, use: TaskUse) -> Iterator[tuple[Place, dict[str, str]]]:
    """Yield every `env` that the job will fill in, with its place."""
    yield ("environment",), keys.environment.env
    if use.oracle:
        yield ("solution",), keys.solution.env
    if not use.verify:
        return
    verifiers = [(("verifier",), keys.verifier)]
    verifiers += [(("steps", index, "verifier"), step.verifier) for index, step in enumerate(keys.steps)]
    for place, verifier in verifiers:
        yield place, verifier.env
        if verifier.environment:
            yield (*place, "environment"), verifier.environment.env
