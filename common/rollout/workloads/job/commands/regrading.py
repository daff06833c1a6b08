"""`rollout job regrade`: fetches what agents left, verifies it again in a run of its own, and compares."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollout.cli.anywhere import Places, at_run, cluster_of
from rollout.cli.asking import once, tell
from rollout.cli.boundary import FAILED, INTERRUPTED, OK
from rollout.cli.session import run_workload
from rollout.cli.show import print_json
from rollout.cli.work_options import Options
from rollout.config.load import load_settings, located
from rollout.model.errors import ConfigError, NotFoundError
from rollout.objects.digest import hash_file
from rollout.workloads.job.commands.show_job import print_regraded
from rollout.workloads.job.config import JobConfig
from rollout.workloads.job.job_directory import KeptTrial, read_job_directory
from rollout.workloads.job.regrade import COMPARISON, Regraded, choose, comparison_file, comparison_json, regraded
from rollout.workloads.job.regrade_workload import Regrade, regrade_settings
from rollout.workloads.job.workload import JobChecked
from rollout.workloads.json_form import lookup
from rollout.workloads.output import RUN_CONFIG, disk_errors, unseal, write_atomically
from rollout.workloads.port import check_only

_ARCHIVES = ".archives"
"""Directory with what the agents left, one file per trial, until the run is complete."""
_NAME = re.compile(r"regrade-([1-9]\d{0,8})")
_TELL_EVERY = 100


class Regrading:
    """`globs` select tasks; empty means all."""

    def __init__(self, directory: Path, config: Path | None, globs: tuple[str, ...], **options: Any) -> None:
        self._job = read_job_directory(directory)
        self._config = config
        self._globs = globs
        self._options = options

    def run(self) -> int:
        """Regrade, and return the exit code. Raises ConfigError with all faults, before anything is fetched or
        started."""
        job = self._job
        for note in job.notes:
            tell(f"warning: {note}")
        chosen = choose(job, self._globs)
        for note in chosen.notes:
            tell(f"note: {note}")
        given = None if self._config is None else load_settings(JobConfig, self._config)
        with located(self._config, JobConfig):
            return self._verify_again(given, {trial.label: trial for trial in chosen.trials})

    def _verify_again(self, given: JobConfig | None, chosen: Mapping[str, KeptTrial]) -> int:
        job = self._job
        checked = self._checked(Regrade(chosen, Path()), regrade_settings(job, given, "regrade"))
        directory = job.path / _name(job.path, lookup(checked.config, "input.digest"))
        archives = directory / _ARCHIVES
        with disk_errors(archives):
            lacking = _lacking([chosen[trial.label] for trial in checked.trials], archives)
        if lacking:
            asyncio.run(self._fetch(lacking, archives))
        settings = regrade_settings(job, given, directory.name)
        code = run_workload(Regrade(chosen, archives), settings, Options(words=self._words(), **self._options))
        if code == INTERRUPTED:
            return code
        after = read_job_directory(directory)
        found = regraded(job, after)
        write_atomically(directory / COMPARISON, comparison_file(found))
        self._tell(directory, found)
        if after.state != "completed" or any(trial.result is None for trial in after.trials):
            return FAILED
        shutil.rmtree(archives, ignore_errors=True)
        return OK

    def _checked(self, workload: Regrade, settings: JobConfig) -> JobChecked:
        try:
            return check_only(workload, settings)
        except ConfigError as error:
            if self._config is not None:
                raise
            raise ConfigError(
                f"{error.message}\nthe tasks are those that the job named, as seen from where it was started: give "
                "this command there, or other tasks with --config job.yaml"
            ) from error

    def _words(self) -> tuple[str, ...]:
        words = ["rollout", "job", "regrade", str(self._job.path)]
        words += ["--config", str(self._config)] if self._config is not None else []
        for glob in self._globs:
            words += ["--tasks", glob]
        return tuple(words)

    def _tell(self, directory: Path, found: list[Regraded]) -> None:
        if self._options["json"]:
            print_json({"event": "regraded", "directory": str(directory), **comparison_json(found)})
        else:
            print_regraded(directory, found)

    async def _fetch(self, lacking: Mapping[str, KeptTrial], archives: Path) -> None:
        """Fetch objects by their id in hex, one per trial, from the job's cluster. Raises NotFoundError if one is
        gone."""
        own = cluster_of(self._job.path, self._job.run_id)
        where = Places(own, False, (Path(),), once(tell), takes_dir=False)
        async with at_run(where, self._job.run_id) as (_, runs, _):
            for count, (name, trial) in enumerate(lacking.items()):
                if count % _TELL_EVERY == 0:
                    tell(f"fetching what agents left: {count:,} of {len(lacking):,} archives")
                try:
                    await runs.download(self._job.run_id, bytes.fromhex(name), archives / name)
                except NotFoundError as error:
                    raise NotFoundError(
                        f"{trial.label}: the cluster does not keep what its agent left any more; --tasks GLOB leaves "
                        f"tasks out ({error.message})"
                    ) from error


def _lacking(trials: Sequence[KeptTrial], archives: Path) -> dict[str, KeptTrial]:
    """Return objects of `trials` that are missing in `archives`, and delete those of other trials."""
    wanted = {trial.record.files: trial for trial in trials if trial.record is not None and trial.record.files}
    archives.mkdir(parents=True, exist_ok=True)
    for path in archives.iterdir():
        if path.name not in wanted:
            path.unlink()
    return {name: trial for name, trial in wanted.items() if not _holds(archives / name, name)}


def _holds(path: Path, name: str) -> bool:
    with suppress(OSError):
        return hash_file(path)[0].hex() == name
    return False


def _name(job: Path, digest: str) -> str:
    """Return the name of the directory: the last one if it verifies the same and is incomplete, else a new one."""
    numbers = [int(found[1]) for path in job.iterdir() if (found := _NAME.fullmatch(path.name))]
    last = max(numbers, default=0)
    if last and _unfinished(job / f"regrade-{last}", digest):
        return f"regrade-{last}"
    return f"regrade-{last + 1}"


def _unfinished(directory: Path, digest: str) -> bool:
    try:
        stored = unseal((directory / RUN_CONFIG).read_bytes())
    except OSError:
        return not any(path.name != _ARCHIVES for path in directory.iterdir())
    same = stored is not None and lookup(stored, "config.input.digest") == digest
    return same and read_job_directory(directory).state in ("", "failed")
