"""The directory of a job that a person names: by its path, or as a run is named."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rollout.cli.recent import recent_runs
from rollout.cli.references import LAST, means
from rollout.client.private import STATE_DIR, private_runs
from rollout.model.errors import ConfigError, NotFoundError
from rollout.model.ids import is_ulid, short
from rollout.workloads.job.job_directory import JobDirectory, is_job_directory, read_job_directory
from rollout.workloads.output import RUN_ID

if TYPE_CHECKING:
    from rollout.client import Runs

Tell = Callable[[str], None]
_NEAR = (".", "*", "*/*")
"""Where directories of jobs are looked for, beside those whose private cluster is known."""


@contextmanager
def job_named(text: str, coordinator: list[str] | None, tls_dir: Path | None, tell: Tell) -> Generator[JobDirectory]:
    """What `text` names: a directory, or a run by its id, a unique part of one, its name, or @last.

    Of a run whose directory is not on this machine the files are written from the ledger of its cluster, into a
    directory that goes when this is left. ConfigError, NotFoundError.
    """
    path = directory_of(text, tell)
    if path is not None:
        yield read_job_directory(path)
        return
    with TemporaryDirectory(prefix=".rollout-job-") as scratch:
        _fetch(text, Path(scratch), coordinator, tls_dir, tell)
        yield read_job_directory(Path(scratch))


def directory_of(text: str, tell: Tell) -> Path | None:
    """The directory on this machine that `text` names, which need not be a job's; None: there is none."""
    path = Path(text).expanduser()
    if path.is_dir() and (is_job_directory(path) or _is_path(text)):
        return path
    if (found := _known(text)) is not None:
        tell(f"the job is in {found}")
        return found
    return path if _is_path(text) or path.exists() else None


def _is_path(text: str) -> bool:
    return "/" in text or text in (".", "..")


@dataclass(frozen=True, slots=True)
class _Found:
    run_id: str
    name: str
    path: Path
    near: bool
    """Below the current directory."""


def _known(text: str) -> Path | None:
    """The directory of the job `text`, on this machine; None: there is none. Those below the current directory come
    before all others. ConfigError: there are several, and none comes before the others."""
    first: dict[Path, _Found] = {}
    for one in _jobs():
        first.setdefault(one.path.resolve(), one)
    near = [one for one in first.values() if one.near]
    return _among(near, text) or _among([one for one in first.values() if not one.near], text)


def _among(jobs: Sequence[_Found], text: str) -> Path | None:
    """As `_known`, of these."""
    if text == LAST:
        of_run = {one.run_id: one.path for one in jobs}
        return next((of_run[run_id] for run_id in recent_runs() if run_id in of_run), None)
    named = [one for one in jobs if one.name == text]
    if len(named) > 1:
        listed = ", ".join(str(one.path) for one in named)
        raise ConfigError(
            f'{len(named)} jobs are called "{text}": name the directory of the one that is meant: {listed}'
        )
    if named:
        return named[0].path
    wanted = text.upper()
    by_id = [one for one in jobs if one.run_id == wanted or (not is_ulid(wanted) and means(one.run_id, text))]
    if len(by_id) > 1:
        listed = ", ".join(f"{short(one.run_id)} ({one.path})" for one in by_id)
        raise ConfigError(f"{text!r} may be any of {len(by_id)} jobs: {listed}")
    return by_id[0].path if by_id else None


def known_jobs() -> dict[str, Path]:
    """By name, of those on this machine that a name alone finds; the nearest of several."""
    found: dict[str, Path] = {}
    for one in _jobs():
        found.setdefault(one.name, one.path)
    return found


def _jobs() -> Iterator[_Found]:
    for pattern in _NEAR:
        with suppress(OSError):
            for path in sorted(Path().glob(f"{pattern}/{RUN_ID}")):
                if not any(part.startswith(".") for part in path.parts[:-1]):
                    yield from _job_at(path.parent, "", near=True)
    for run in reversed(private_runs()):
        output = run.state.parent if run.state.name == STATE_DIR else run.state
        yield from _job_at(output, run.name, near=False)


def _job_at(path: Path, name: str, *, near: bool) -> Iterator[_Found]:
    with suppress(OSError, ValueError):
        if is_job_directory(path):
            yield _Found((path / RUN_ID).read_text("ascii").strip(), name or path.resolve().name, path, near)


def _fetch(text: str, directory: Path, coordinator: list[str] | None, tls_dir: Path | None, tell: Tell) -> None:
    from rollout.cli.anywhere import work_at_run
    from rollout.cli.progress import NotesOnly
    from rollout.cli.results import ResultsOf

    async def write(client: Runs, run_id: str) -> None:
        status = await client.get(run_id)
        if status.spec.workload != "job":
            raise ConfigError(f"run {short(run_id)} is no job: it is of the workload {status.spec.workload}")
        await ResultsOf(client, run_id, directory, NotesOnly(tell), [], place=False).write()

    try:
        work_at_run(coordinator, tls_dir, text, write, tell)
    except NotFoundError as error:
        raise NotFoundError(f"{text!r} is no directory of a job here, and {error.message}") from error
    tell(
        "the job's directory is not on this machine: these are its results as the ledger has them; what its trials "
        f"left comes with: rollout run results {text} --output DIR"
    )
