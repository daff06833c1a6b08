"""Finds the directory of a job that the user names by its path or like a run."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rollout.cli.directories import Kind, Tell, known_directories
from rollout.cli.directories import directory_of as named_directory
from rollout.model.errors import ConfigError, NotFoundError
from rollout.model.ids import short
from rollout.workloads.job.job_directory import JobDirectory, is_job_directory, read_job_directory

if TYPE_CHECKING:
    from rollout.client import Runs

JOB = Kind("job", "jobs", is_job_directory)


@contextmanager
def job_named(text: str, coordinator: list[str] | None, tls_dir: Path | None, tell: Tell) -> Generator[JobDirectory]:
    """Yield the job that `text` names: a directory, or a run by its id, a unique part of it, its name, or @last.

    If the run's directory is not on this machine, its files are written from the ledger of its cluster to a temporary
    directory. Raises ConfigError or NotFoundError.
    """
    path = directory_of(text, tell)
    if path is not None:
        yield read_job_directory(path)
        return
    with TemporaryDirectory(prefix=".rollout-job-") as scratch:
        _fetch(text, Path(scratch), coordinator, tls_dir, tell)
        yield read_job_directory(Path(scratch))


def directory_of(text: str, tell: Tell) -> Path | None:
    """Return the directory as `rollout.cli.directories` does."""
    return named_directory(JOB, text, tell)


def known_jobs() -> dict[str, Path]:
    """Return jobs as `known_directories` does."""
    return known_directories(JOB)


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
