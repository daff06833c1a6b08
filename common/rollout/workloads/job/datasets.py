"""Finds the tasks of a job's datasets: local directories, registries and git repositories, with all faults at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from rollout.model.errors import ConfigError, InputError, RolloutError
from rollout.model.problems import faults_of, problems
from rollout.workloads.job import git
from rollout.workloads.job.config import ORACLE, DatasetSection, JobConfig, TaskSection
from rollout.workloads.job.dialect import DialectName, unsettled
from rollout.workloads.job.load_task import TaskUse, load_task
from rollout.workloads.job.names import portable_name, same_name
from rollout.workloads.job.registry import RegistryDataset, RegistryTask, fetch_registry, find_dataset, read_registry
from rollout.workloads.job.task import Task
from rollout.workloads.job.task_directory import CONFIG

_MARKS = (CONFIG, "instruction.md")
ADHOC = "adhoc"
"""The dataset of tasks that a job names one by one."""
BUNDLED = "bundled:"
"""Prefix of datasets that are part of this package: `path: bundled:harbor`."""
_BUNDLED_AT = Path(__file__).with_name("bundled")


@dataclass(frozen=True, slots=True)
class Dataset:
    name: str
    version: str
    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """`notes` are for the user, such as unknown keys in tasks of others. `size` is that of all tasks in bytes."""

    datasets: tuple[Dataset, ...]
    notes: tuple[str, ...]
    size: int


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a task. `ours` means that the user can edit the file. `dialect` is that of `load_task`, if it
    differs from the dataset's."""

    name: str
    directory: Path
    commit: str | None
    ours: bool
    dialect: DialectName | None = None


@dataclass(frozen=True, slots=True)
class _Found:
    name: str
    version: str
    places: tuple[_Place, ...]


def load_datasets(
    config: JobConfig,
    *,
    environ: Mapping[str, str] | None = None,
    cache: Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Loaded:
    """Load every task that `config` names. Repositories are fetched to `cache` (`git.cache_directory`). Blocking.

    Raises ConfigError with every fault of every task. `environ` provides variables of tasks; None means that they are
    set elsewhere and not checked. `progress` is called with each repository and task before it is read.
    """
    oracle = any(agent.name == ORACLE for agent in config.agents)
    use = TaskUse(verify=not config.verifier.disable, oracle=oracle, environ=environ)
    loader = _Loader(use, cache or git.cache_directory(), progress)
    datasets = list[Dataset]()
    for index, section in enumerate(config.datasets):
        datasets += loader.dataset(f"datasets.{index}", section)
    if config.tasks:
        datasets += loader.adhoc(config.tasks)
    loader.faults += _same_names(datasets)
    if loader.faults:
        raise ConfigError(problems(loader.faults))
    return Loaded(tuple(datasets), tuple(loader.notes), loader.size)


def dataset_faults(key: str, section: DatasetSection) -> list[str]:
    """Return faults of a dataset that show on this machine: it is missing, or its globs find no tasks. `key` is its
    place."""
    if section.path is None or section.git_url is not None:
        return []
    loader = _Loader(TaskUse(verify=True, oracle=False), git.cache_directory(), lambda text: None)
    loader.places(key, section)
    return loader.faults


def _same_names(datasets: Sequence[Dataset]) -> Iterator[str]:
    seen = set[str]()
    for dataset in datasets:
        if same_name(dataset.name) in seen:
            yield f'datasets: two are called "{dataset.name}": give one another name, as name: beside its path'
        seen.add(same_name(dataset.name))


class _Loader:
    def __init__(self, use: TaskUse, cache: Path, progress: Callable[[str], None]) -> None:
        self._use = use
        self._cache = cache
        self._progress = progress
        self._commits: dict[tuple[str, str | None], str] = {}
        self.faults = list[str]()
        self.notes = list[str]()
        self.size = 0

    def dataset(self, key: str, section: DatasetSection) -> list[Dataset]:
        """Return a list with the dataset, or an empty one if it has a fault."""
        found = self.places(key, section)
        if found is None:
            return []
        return [Dataset(found.name, found.version, self._tasks(key, found.places, section.dialect))]

    def places(self, key: str, section: DatasetSection) -> _Found | None:
        """Return the dataset with the tasks that its globs select, or None if it has a fault."""
        try:
            found = self._find(section)
            return replace(found, places=tuple(chosen(found.places, section, found.name)))
        except RolloutError as error:
            self.faults += [f"{key}: {fault}" for fault in faults_of(error.message)]
            return None

    def adhoc(self, sections: Iterable[TaskSection]) -> list[Dataset]:
        places = list[_Place]()
        for index, section in enumerate(sections):
            try:
                places.append(replace(self._single(section), dialect=section.dialect))
            except RolloutError as error:
                self.faults.append(f"tasks.{index}: {error.message}")
        return [Dataset(ADHOC, "", self._tasks("tasks", places, None))]

    def _find(self, section: DatasetSection) -> _Found:
        if section.registry is not None and section.name is not None:
            return self._of_registry(section.registry.path, section.registry.url, section.name, section.version)
        if section.git_url is not None:
            commit, top = self._checkout(section.git_url, section.git_commit_id)
            directory = inside(top, section.path or "", git.shown(section.git_url))
            name = section.name or (directory.name if section.path else _repository_name(section.git_url))
            return _Found(portable(name), commit, tuple(_tasks_below(directory, commit, ours=False)))
        path = section.path or ""
        if path.startswith(BUNDLED):  # whatever repository this package lies in, it is not theirs
            return _Found(portable(section.name or path.removeprefix(BUNDLED)), "", tuple(_bundled(path)))
        directory = Path(path).expanduser()
        found = git.commit_of(directory) if directory.is_dir() else None
        places = tuple(_tasks_below(directory, found.id if found else None, ours=True))
        if found and found.changed:
            differ = "1 path differs" if len(found.changed) == 1 else f"{len(found.changed):,} paths differ"
            self.notes.append(
                f"{directory}: {differ} from commit {found.id[:12]}; the checksums of the tasks say what runs"
            )
        return _Found(portable(section.name or directory.resolve().name), section.version or "", places)

    def _of_registry(self, path: str | None, url: str | None, name: str, version: str | None) -> _Found:
        if path is not None:
            file = Path(path).expanduser()
            dataset = find_dataset(read_registry(file), name, version, path)
            beside = file.parent
        else:
            where = url or ""
            self._progress(where)
            dataset = find_dataset(fetch_registry(where), name, version, where)
            beside = None
        return _Found(portable(name), dataset.version, tuple(self._places(dataset, beside)))

    def _places(self, dataset: RegistryDataset, beside: Path | None) -> Iterator[_Place]:
        if not dataset.tasks:
            raise InputError(f'the dataset "{dataset.name}" has no tasks')
        faults = list[str]()
        for task in dataset.tasks:
            try:
                yield self._place(task, beside)
            except RolloutError as error:
                faults.append(f'task "{task.name}": {error.message}')
        if faults:
            raise InputError(problems(faults))

    def _place(self, task: RegistryTask, beside: Path | None) -> _Place:
        name = portable(task.name)
        if task.git_url is not None:
            commit, top = self._checkout(task.git_url, task.git_commit_id)
            return _Place(name, inside(top, task.path, git.shown(task.git_url)), commit, ours=False)
        if beside is None:
            raise InputError("it has no git_url, and the registry is not on this machine")
        return _Place(name, inside(beside, task.path or task.name, str(beside)), None, ours=True)

    def _single(self, section: TaskSection) -> _Place:
        if section.git_url is not None:
            commit, top = self._checkout(section.git_url, section.git_commit_id)
            directory = inside(top, section.path, git.shown(section.git_url))
            return _Place(portable(directory.name), directory, commit, ours=False)
        directory = Path(section.path).expanduser()
        found = git.commit_of(directory) if directory.is_dir() else None
        return _Place(portable(directory.resolve().name), directory, found.id if found else None, ours=True)

    def _checkout(self, url: str, reference: str | None) -> tuple[str, Path]:
        """Return (commit, directory). A branch or tag is resolved once per job, so that all its tasks have one
        commit."""
        try:
            git.checked_url(url)
        except ValueError as error:
            raise InputError(str(error)) from error
        self._progress(git.shown(url))
        commit = self._commits.get((url, reference))
        if commit is None:
            commit = self._commits[url, reference] = git.resolve_commit(url, reference)
        return commit, git.checkout(url, commit, self._cache)

    def _tasks(self, key: str, places: Sequence[_Place], dialect: DialectName | None) -> tuple[Task, ...]:
        tasks, undecided = list[Task](), list[str]()
        seen: dict[str, _Place] = {}
        for place in places:
            self._progress(str(place.directory))
            other = seen.setdefault(same_name(place.name), place)
            if other is not place:
                self.faults.append(
                    f'{key}: two tasks are called "{place.name}": {other.directory} and {place.directory}'
                )
                continue
            use = self._use if place.ours else replace(self._use, strict=False)
            meant = place.dialect or dialect
            try:
                loaded = load_task(place.directory, use, name=place.name, dialect=meant, git_commit_id=place.commit)
            except ConfigError as error:
                self.faults += faults_of(error.message)
                continue
            tasks.append(loaded.task)
            self.notes += loaded.notes
            self.size += loaded.size
            if not loaded.settled:
                undecided.append(place.name)
        if undecided:
            self.faults.append(unsettled(key, len(undecided), undecided[0]))
        return tuple(tasks)


def _tasks_below(directory: Path, commit: str | None, *, ours: bool) -> Iterator[_Place]:
    """Yield the directories below `directory` that look like tasks, in order of name. Raises InputError if there are
    none."""
    if (directory / CONFIG).exists():
        raise InputError(f"{directory} is a task; a dataset is a directory of tasks: put it under tasks: - path:")
    try:
        entries = sorted(entry for entry in directory.iterdir() if not entry.name.startswith("."))
    except FileNotFoundError as error:
        raise InputError(f"{directory}: there is no such directory") from error
    except OSError as error:
        raise InputError(f"{directory}: cannot be read: {error.strerror or error}") from error
    places, faults = list[_Place](), list[str]()
    for entry in entries:
        if any((entry / file).exists() for file in _MARKS):
            try:
                places.append(_Place(portable(entry.name), entry, commit, ours))
            except InputError as error:
                faults.append(f"{directory}: {error.message}")
    if faults:
        raise InputError(problems(faults))
    if not places:
        raise InputError(f"{directory} holds no tasks: none of its directories has a {CONFIG}")
    yield from places


def _bundled(path: str) -> Iterator[_Place]:
    """Yield the tasks of a bundled dataset. Raises InputError if there is none of that name."""
    known = sorted(entry.name for entry in _BUNDLED_AT.iterdir())
    name = path.removeprefix(BUNDLED)
    if name not in known:
        listed = " and ".join(f"{BUNDLED}{one}" for one in known)
        raise InputError(f'there is no bundled dataset "{name}"; there are {listed}')
    return _tasks_below(_BUNDLED_AT / name, None, ours=True)


def chosen(places: Sequence[_Place], section: DatasetSection, name: str) -> list[_Place]:
    """Return the first n tasks that the globs of `section` select. Raises InputError for a glob that selects none."""
    for pattern in section.task_names:
        if not any(fnmatchcase(place.name, pattern) for place in places):
            known = ", ".join(place.name for place in places[:10]) + (", ..." if len(places) > 10 else "")
            raise InputError(f'no task of {name} is called "{pattern}"; it has {known}')
    taken = [
        place
        for place in places
        if (not section.task_names or any(fnmatchcase(place.name, glob) for glob in section.task_names))
        and not any(fnmatchcase(place.name, glob) for glob in section.exclude_task_names)
    ]
    if not taken:
        raise InputError(f"exclude_task_names leaves no task of {name}")
    return taken[: section.n_tasks]


def inside(top: Path, path: str, where: str) -> Path:
    """Return `path` below `top`. Raises InputError if it leads out, or there is no such directory."""
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise InputError(f'{where}: the path "{path}" leads out of it')
    found = top / path
    if not found.is_dir() or not found.resolve().is_relative_to(top.resolve()):
        raise InputError(f'{where}: there is no directory "{path}"')
    return found


def portable(name: str) -> str:
    """Return `names.portable_name`, raising InputError."""
    try:
        return portable_name(name)
    except ValueError as error:
        raise InputError(str(error)) from error


def _repository_name(url: str) -> str:
    return url.rstrip("/").removesuffix(".git").replace(":", "/").rpartition("/")[2]
