"""Compares two jobs by their directories, or two agents of one job, task by task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rollout.model.errors import ConfigError, InputError
from rollout.workloads.job.aggregate import scores_by_task
from rollout.workloads.job.compare import Comparison, TaskKey, compare
from rollout.workloads.job.job_directory import JobDirectory
from rollout.workloads.json_form import JsonObject

Scores = dict[TaskKey, list[float]]


@dataclass(frozen=True, slots=True)
class Compared:
    """`only_a` and `only_b` are tasks, as dataset/task, that were scored in one alone. `moved` are tasks that were read
    at another commit."""

    comparison: Comparison
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    moved: tuple[str, ...]


def compare_directories(
    a: JobDirectory, b: JobDirectory, agents: Sequence[str] = ()
) -> tuple[list[Compared], list[str]]:
    """Compare, with no `agents`, each agent of both jobs with itself, or the only agent of each job; with one, this
    agent of both jobs; with two, the first of A with the second of B.

    Also returns notes about agents that cannot be compared because no task was scored in both. Raises ConfigError if
    there is no such agent, it is compared with itself, or there is nothing to compare; InputError if no agent can be
    compared.
    """
    found, impossible = list[Compared](), list[str]()
    for one, other in _pairs(a, b, agents):
        try:
            found.append(_compared(a, one, b, other))
        except InputError as error:
            impossible.append(error.message)
    if not found:
        raise InputError("\n".join(impossible))
    return found, impossible


def _pairs(a: JobDirectory, b: JobDirectory, agents: Sequence[str]) -> list[tuple[str, str]]:
    if len(agents) > 2:
        raise ConfigError(f"--agent: {len(agents)} are named; two can be compared at a time")
    same_job = a.path.resolve() == b.path.resolve()
    if agents:
        one, other = agents[0], agents[-1]
        for name, job in ((one, a), (other, b)):
            if name not in job.agents:
                raise ConfigError(f'{job.name} has no agent "{name}"; it has {_listed(job.agents)}')
        if same_job and one == other:
            raise ConfigError(f"{one} is compared with itself: name two agents of {a.name}, or another job")
        return [(one, other)]
    if same_job:
        if len(a.agents) != 2:
            raise ConfigError(
                f"{a.name} has the agents {_listed(a.agents)}: name two with --agent X --agent Y, or another job"
            )
        return [(a.agents[0], a.agents[1])]
    pairs = [(name, name) for name in a.agents if name in b.agents]
    if not pairs and len(a.agents) == len(b.agents) == 1:
        return [(a.agents[0], b.agents[0])]
    if not pairs:
        raise ConfigError(
            f"no agent is in both jobs: {a.name} has {_listed(a.agents)}, {b.name} has {_listed(b.agents)}; name the "
            "two with --agent X --agent Y"
        )
    return pairs


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _compared(a: JobDirectory, one: str, b: JobDirectory, other: str) -> Compared:
    scores_a, scores_b = _scores(a, one), _scores(b, other)
    comparison = compare(one, scores_a, other, scores_b)
    commits_a, commits_b = _commits(a, one), _commits(b, other)
    return Compared(
        comparison=comparison,
        only_a=tuple("/".join(task) for task in scores_a if task not in scores_b),
        only_b=tuple("/".join(task) for task in scores_b if task not in scores_a),
        moved=tuple("/".join(task) for task in scores_a if task in scores_b and commits_a[task] != commits_b[task]),
    )


def _scores(job: JobDirectory, agent: str) -> Scores:
    return scores_by_task([trial.planned for trial in job.trials if trial.agent == agent], job.overrides)


def _commits(job: JobDirectory, agent: str) -> dict[TaskKey, str | None]:
    return {
        (trial.dataset, trial.task): trial.result.task_git_commit_id
        for trial in job.trials
        if trial.agent == agent and trial.result is not None
    }


def compared_json(found: Compared) -> JsonObject:
    """Return an object of `rollout job compare --json`."""
    values = asdict(found.comparison)
    counts = {"tasks_only_a": values.pop("only_a"), "tasks_only_b": values.pop("only_b")}
    return {**values, **counts, "only_a": list(found.only_a), "only_b": list(found.only_b), "moved": list(found.moved)}
