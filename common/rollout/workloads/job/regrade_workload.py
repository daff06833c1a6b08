"""A run without agents: what agents left in an earlier run is verified again, with the current tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from blake3 import blake3

from rollout.model.errors import ConfigError
from rollout.model.item import NewItem
from rollout.model.problems import problems
from rollout.workloads.job.config import JobConfig
from rollout.workloads.job.datasets import load_datasets
from rollout.workloads.job.job_directory import JobDirectory, KeptTrial
from rollout.workloads.job.plan import plan
from rollout.workloads.job.run_config import digest_of, item_of, job_json, run_config
from rollout.workloads.job.workload import Job, JobChecked
from rollout.workloads.json_form import JsonObject
from rollout.workloads.port import InputReader, Tree

_ARCHIVES = "archives"
"""Key of the run's configuration with the tree of what the agents left, one file per trial."""


def regrade_settings(job: JobDirectory, given: JobConfig | None, name: str) -> JobConfig:
    """Return the run's settings: those of the job, or of the given file, with the agents and attempts of the job.

    Raises ConfigError if the job's settings are unknown.
    """
    settings = given or job.config
    if settings is None:
        raise ConfigError(f"{job.path} has no config.json that can be read: name the job's file with --config job.yaml")
    agents = job.config.agents if job.config is not None else settings.agents
    attempts = max((trial.attempt for trial in job.trials), default=1)
    changes = {"name": name, "jobs_dir": str(job.path), "agents": agents, "n_attempts": attempts}
    return settings.model_copy(update=changes)


class Regrade(Job):
    """`chosen` are the trials to verify again, by label. `archives` is the directory with a file for each object."""

    def __init__(self, chosen: Mapping[str, KeptTrial], archives: Path) -> None:
        super().__init__()
        self._chosen = chosen
        self._archives = archives

    def check(self, settings: JobConfig, reading: InputReader) -> JobChecked:
        no_agent_works = [agent.model_copy(update={"env": {}}) for agent in settings.agents]
        if faults := self.faults_beside(settings.model_copy(update={"agents": no_agent_works}), reading):
            raise ConfigError(problems(faults))
        loaded = load_datasets(settings, progress=lambda what: reading.tell(f"reading tasks: {what}"))
        files = {label: record.files for label, trial in self._chosen.items() if (record := trial.record) is not None}
        trials = tuple(
            replace(trial, id=blake3(trial.id + bytes.fromhex(found)).digest())
            for trial in plan(settings, loaded.datasets)
            if (found := files.get(trial.label)) is not None
        )
        if not trials:
            raise ConfigError("no trial is of a task that is there now: name the job's tasks with --config job.yaml")
        config = run_config(settings, trials)
        config["output"] = {
            "planned": [(trial.id.hex(), trial.label) for trial in trials],
            "job": job_json(settings),
            "kept": "",
        }
        config |= {"used": {}, _ARCHIVES: ""}
        directories = {trial.task.checksum: trial.task.directory for trial in trials}
        gone = sorted(set(files) - {trial.label for trial in trials})
        notes = [f"{len(gone):,} left out, of tasks that are not there now: {', '.join(gone[:3])}"] if gone else []
        return JobChecked(
            config=config,
            total=len(trials),
            trees=(
                *(Tree(f"trees.{checksum}", path, always=True) for checksum, path in directories.items()),
                Tree(_ARCHIVES, self._archives, always=True),
            ),
            keep={
                "plan": digest_of(trial.id for trial in trials),
                "job": {},
                "trials": len(trials),
                "kept": "",
                "used": {},
            },
            notes=(*loaded.notes, *notes),
            job=settings,
            loaded=loaded,
            trials=trials,
            left=trials,
        )

    def plan(self, checked: JobChecked, config: JsonObject, start: int) -> Iterator[NewItem]:
        for trial in checked.left[start:]:
            record = self._chosen[trial.label].record
            yield item_of(trial, checked.job, record.files if record is not None else None)
