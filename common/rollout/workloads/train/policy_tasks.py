"""Job tasks as the environment of a policy. The client checks them as `rollout job run` does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rollout.model.errors import ConfigError
from rollout.model.problems import faults_of, problems
from rollout.workloads.job.config import JobConfig
from rollout.workloads.job.datasets import load_datasets
from rollout.workloads.job.first_look import beside_datasets
from rollout.workloads.job.network import NetworkMode
from rollout.workloads.job.providers_here import network_faults, openness, refusals
from rollout.workloads.job.run_config import job_json
from rollout.workloads.job.trial import TrialSpec
from rollout.workloads.job.try_agents import try_agents
from rollout.workloads.json_form import JsonObject
from rollout.workloads.port import Tree
from rollout.workloads.train.policy_config import EnvironmentSection, PolicySection

JOB = "job"
"""The executor of trials."""
_ATTEMPT = 1
_KEYS = {"environment": "sandbox", "agents.0": "agent"}
"""Sections of job.yaml, with their names here."""


@dataclass(frozen=True, slots=True)
class Tasks:
    """The tasks of a run. `specs` has, by dataset and task, the spec of a trial (`TaskPlay.spec`)."""

    job: JobConfig
    specs: dict[str, dict[str, JsonObject]] = field(default_factory=dict[str, dict[str, JsonObject]])
    directories: dict[str, Path] = field(default_factory=dict[str, Path])
    notes: list[str] = field(default_factory=list[str])

    @property
    def table(self) -> JsonObject:
        """The table of the run's configuration for the executor of trials."""
        return {"job": job_json(self.job), "trees": {one: one for one in self.directories}, "tasks": self.specs}

    @property
    def trees(self) -> Iterator[Tree]:
        for checksum, directory in self.directories.items():
            yield Tree(f"executors.{JOB}.trees.{checksum}", directory, always=True)


def find_tasks(section: PolicySection, where: str, tell: Callable[[str], None], *, here: bool) -> Tasks | None:
    """Find the tasks, or return None if there are none. `here` means that workers start on this machine. Raises
    ConfigError with all faults."""
    environment = section.tasks
    if environment is None:
        return None
    found, faults = Tasks(environment.job(None)), list[str]()
    environ = os.environ if here else None
    beside = list(beside_datasets(found.job, environ))
    found.notes.extend(openness(found.job.environment, here=here))
    if here:
        tried, doubted = try_agents(found.job, tell)
        beside += [*tried, *refusals(found.job.environment)]
        found.notes.extend(doubted)
    faults += (f"{where}.environment.{_renamed(fault)}" for fault in beside)
    for dataset, key in (("dataset", "path"), ("eval_dataset", "eval_path")):
        try:
            _load(found, environment, dataset, getattr(environment, key), here=here)
        except ConfigError as error:
            told = (_without(fault) for fault in faults_of(error.message))
            faults += (fault if ".toml:" in fault else f"{where}.environment.{key}: {fault}" for fault in told)
    if faults:
        raise ConfigError(problems(dict.fromkeys(faults)))
    return found


def _load(found: Tasks, environment: EnvironmentSection, dataset: str, path: str | None, *, here: bool) -> None:
    if path is None:
        return
    loaded = load_datasets(environment.job(path), environ=os.environ if here else None)
    found.notes.extend(loaded.notes)
    tasks = [task for one in loaded.datasets for task in one.tasks]
    if here and not list(refusals(environment.sandbox)):
        modes: set[NetworkMode] = {step.agent.network.mode for task in tasks for step in task.steps}
        if wrong := list(network_faults(environment.sandbox, modes)):
            raise ConfigError(problems(wrong))
    found.directories.update({task.checksum: task.directory for task in tasks})
    agent = found.job.agents[0].id
    found.specs[dataset] = {
        task.name: TrialSpec(
            id="", dataset=dataset, task=task.name, checksum=task.checksum, dialect=task.dialect_name,
            commit=task.git_commit_id, agent=agent, attempt=_ATTEMPT,
        ).model_dump(mode="json", exclude_defaults=True)
        for task in tasks
    }  # fmt: skip


def _renamed(fault: str) -> str:
    for theirs, ours in _KEYS.items():
        if fault.startswith((f"{theirs}.", f"{theirs}:")):
            return ours + fault.removeprefix(theirs)
    return fault


def _without(fault: str) -> str:
    """Remove the key of job.yaml that a fault begins with."""
    for key in ("datasets.0: ", "tasks.0: ", "datasets.0.", "tasks: "):
        fault = fault.removeprefix(key)
    return fault
