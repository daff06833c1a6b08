"""The trials of a job: each agent on each task, as often as asked, in a fixed order, with stable ids.

The id of a trial is a hash of everything that changes its result: the task's files, the agent's settings, those of the
job that affect a trial, and the number of the attempt. It does not cover the rest: other agents, other tasks, the
number of attempts, the number of concurrent trials. So adding any of these keeps every id, and a changed task or agent
changes only its own. Settings with their default are not hashed either: a key that a later version adds keeps the ids
of jobs that do not use it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from blake3 import blake3

from rollout.workloads.job.config import AgentSection, JobConfig, asks_engine
from rollout.workloads.job.datasets import Dataset
from rollout.workloads.job.task import Task
from rollout.workloads.json_form import JsonObject, canonical

_SCHEMA = b"\x01"
_OF_TRIALS = frozenset(
    {
        "timeout_multiplier",
        "agent_timeout_multiplier",
        "verifier_timeout_multiplier",
        "agent_setup_timeout_multiplier",
        "environment_build_timeout_multiplier",
        "instruction_path",
        "environment",
        "verifier",
        "artifacts",
    }
)
"""Keys of job.yaml that change what a trial does."""
_NOT_OF_ENVIRONMENTS = frozenset({"force_build", "preserve_env"})
_NOT_OF_AGENTS = frozenset({"label", "description", "n_concurrent", "concurrency_group"})


@dataclass(frozen=True, slots=True)
class Trial:
    """`attempt` counts from 1."""

    id: bytes
    dataset: str
    task: Task
    agent: AgentSection
    attempt: int

    @property
    def directory(self) -> PurePosixPath:
        """Path of its results below that of the job."""
        return PurePosixPath(self.dataset, self.task.name, self.agent.id, str(self.attempt))

    @property
    def label(self) -> str:
        """The trial's name for users, the same as in its `TrialSpec`."""
        return str(self.directory)


def plan(config: JobConfig, datasets: Sequence[Dataset], model: str = "") -> Iterator[Trial]:
    """Yield trials attempt by attempt, within it task by task, within it agent by agent, so that an exhausted budget
    ends all agents alike.

    `model` is the content id of the model of `engine`, part of the identity of trials that query it.
    """
    settings = canonical(_settings(config))
    tasks = [(dataset.name, task, _task_identity(dataset.name, task)) for dataset in datasets for task in dataset.tasks]
    agents = [(agent, canonical(_agent_identity(config, agent, model))) for agent in config.agents]
    for attempt in range(1, config.n_attempts + 1):
        for dataset, task, task_identity in tasks:
            for agent, identity in agents:
                prefix = blake3(_SCHEMA)
                for part in (settings, identity, task_identity):
                    prefix.update(len(part).to_bytes(8, "little") + part)
                yield Trial(
                    id=blake3(prefix.digest() + attempt.to_bytes(8, "little")).digest(),
                    dataset=dataset,
                    task=task,
                    agent=agent,
                    attempt=attempt,
                )


def _settings(config: JobConfig) -> JsonObject:
    values = config.model_dump(mode="json", exclude_defaults=True, include=set(_OF_TRIALS))
    environment: JsonObject = values.pop("environment", {})
    reaching = {key: value for key, value in environment.items() if key not in _NOT_OF_ENVIRONMENTS}
    return {**values, "environment": reaching}


def _agent_identity(config: JobConfig, agent: AgentSection, model: str) -> JsonObject:
    settings = agent.model_dump(mode="json", exclude_defaults=True, exclude=set(_NOT_OF_AGENTS))
    engine: JsonObject = {}
    if config.engine is not None and asks_engine(agent, config):
        engine = {"engine": config.engine.identity(), "model": model}
    return {"agent": agent.id, **settings, **engine}


def _task_identity(dataset: str, task: Task) -> bytes:
    """Return the identity of a task: its files, including task.toml, and the dialect by which they are read."""
    return canonical([dataset, task.name, task.checksum, task.dialect_name])


@dataclass(frozen=True, slots=True)
class Change:
    """The difference between the earlier plan of a job and the current one. `kept` and `added` are in current order."""

    kept: tuple[Trial, ...]
    added: tuple[Trial, ...]
    gone: tuple[bytes, ...]


def change(before: Sequence[bytes], trials: Sequence[Trial]) -> Change:
    """Compare plans for a job that continues: kept trials stay, added ones run, and the user is told of removed ones.
    `before` has the ids of the earlier plan."""
    known = set(before)
    now = {trial.id for trial in trials}
    return Change(
        kept=tuple(trial for trial in trials if trial.id in known),
        added=tuple(trial for trial in trials if trial.id not in known),
        gone=tuple(one for one in before if one not in now),
    )
