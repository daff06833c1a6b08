"""Overview of a job: agents, errors, the slowest trials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rollout.workloads.job.aggregate import Statistics, statistics
from rollout.workloads.job.intervals import Estimate
from rollout.workloads.job.job_directory import JobDirectory, KeptTrial
from rollout.workloads.job.pass_at_k import PassAtK
from rollout.workloads.json_form import JsonObject

SLOWEST = 5
EVERY_K_SHOWN_TO = 8


@dataclass(frozen=True, slots=True)
class Tokens:
    n_input: int = 0
    n_cache: int = 0
    n_output: int = 0


@dataclass(frozen=True, slots=True)
class AgentOverview:
    """An agent in all datasets, or in the one `dataset`. `cost_usd` is that of its results; `versions` are those that
    agents reported, without duplicates."""

    agent: str
    dataset: str | None
    statistics: Statistics
    cost_usd: float
    tokens: Tokens
    versions: tuple[str, ...]
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class ErrorCount:
    """Number of trials that ended with an error of this type, their agents, and the message of one of them."""

    type: str
    count: int
    agents: dict[str, int]
    example: str


@dataclass(frozen=True, slots=True)
class Overview:
    agents: tuple[AgentOverview, ...]
    groups: tuple[AgentOverview, ...]
    """Agents by dataset; empty if there is one dataset."""
    errors: tuple[ErrorCount, ...]
    slowest: tuple[KeptTrial, ...]


def overview(job: JobDirectory) -> Overview:
    datasets = list(dict.fromkeys(trial.dataset for trial in job.trials))
    agents = [
        _agent(job, agent, None if len(datasets) > 1 else dataset, [t for t in job.trials if t.agent == agent])
        for agent in job.agents
        for dataset in datasets[:1]
    ]
    groups = [
        _agent(job, agent, dataset, trials)
        for agent in job.agents
        for dataset in datasets
        if (trials := [t for t in job.trials if (t.agent, t.dataset) == (agent, dataset)])
    ]
    ran = [trial for trial in job.trials if trial.result is not None]
    slowest = sorted(ran, key=lambda trial: trial.result.durations.total_sec if trial.result else 0.0, reverse=True)
    return Overview(
        agents=tuple(agents),
        groups=tuple(groups) if len(datasets) > 1 else (),
        errors=tuple(_errors(ran)),
        slowest=tuple(slowest[:SLOWEST]),
    )


def _agent(job: JobDirectory, agent: str, dataset: str | None, trials: Sequence[KeptTrial]) -> AgentOverview:
    records = [trial.record for trial in trials if trial.record is not None]
    return AgentOverview(
        agent=agent,
        dataset=dataset,
        statistics=statistics([trial.planned for trial in trials], job.overrides),
        cost_usd=math.fsum(trial.result.cost for trial in trials if trial.result is not None),
        tokens=Tokens(
            sum(record.usage.n_input_tokens for record in records),
            sum(record.usage.n_cache_tokens for record in records),
            sum(record.usage.n_output_tokens for record in records),
        ),
        versions=tuple(dict.fromkeys(record.agent_version for record in records if record.agent_version)),
        metrics={} if dataset is None else dict(job.metrics.get((agent, dataset), {})),
    )


def _errors(trials: Sequence[KeptTrial]) -> list[ErrorCount]:
    """Count errors, the most frequent first."""
    found: dict[str, list[KeptTrial]] = {}
    for trial in trials:
        if trial.result is not None and trial.result.error is not None:
            found.setdefault(trial.result.error.type, []).append(trial)
    counted: list[ErrorCount] = []
    for name, of_type in found.items():
        agents: dict[str, int] = {}
        for trial in of_type:
            agents[trial.agent] = agents.get(trial.agent, 0) + 1
        first = of_type[0].result
        example = first.error.message if first is not None and first.error is not None else ""
        counted.append(ErrorCount(name, len(of_type), agents, example))
    return sorted(counted, key=lambda one: (-one.count, one.type))


def shown_ks(found: Sequence[PassAtK]) -> list[PassAtK]:
    """Select those that fit a table: all, or powers of two and the largest; none if there was one attempt."""
    largest = found[-1].k if found else 0
    if largest < 2:
        return []
    if len(found) <= EVERY_K_SHOWN_TO:
        return list(found)
    return [one for one in found if one.k & (one.k - 1) == 0 or one.k == largest]


# ---- for programs


def overview_json(job: JobDirectory, found: Overview) -> JsonObject:
    """Return the object of `rollout job show --json`."""
    return {
        "job": job.name,
        "run_id": job.run_id or None,
        "directory": str(job.path),
        "state": job.state or None,
        "reason": job.reason or None,
        "agents": [_agent_json(one) for one in found.agents],
        "groups": [_agent_json(one) for one in found.groups],
        "errors": [asdict(one) for one in found.errors],
        "slowest": [
            {"trial": one.label, "total_sec": one.result.durations.total_sec} for one in found.slowest if one.result
        ],
        "earlier": job.earlier,
        "notes": list(job.notes),
    }


def _agent_json(one: AgentOverview) -> JsonObject:
    values: dict[str, Any] = asdict(one.statistics)
    return {
        "agent": one.agent,
        "dataset": one.dataset,
        "counts": values["counts"],
        "pass_rate": values["pass_rate"],
        "mean_reward": values["mean_reward"],
        "pass_at_k": [{"k": each.k, **asdict(each.value)} for each in one.statistics.pass_at_k],
        "metrics": one.metrics,
        "errors": values["errors"],
        "cost_usd": one.cost_usd,
        "tokens": asdict(one.tokens),
        "versions": list(one.versions),
    }


# ---- for people


def percent(value: Estimate | None) -> str:
    """Format a rate as `66.7 % [43.1, 84.5]`, without the interval if there is none; a dash if nothing was scored."""
    if value is None:
        return "-"
    interval = ""
    if value.low is not None and value.high is not None:
        interval = f" [{value.low * 100:.1f}, {value.high * 100:.1f}]"
    return f"{value.mean * 100:.1f} %{interval}"


def number(value: Estimate | None) -> str:
    """Format a mean as `0.667 [0.431, 0.845]`."""
    if value is None:
        return "-"
    interval = "" if value.low is None or value.high is None else f" [{_plain(value.low)}, {_plain(value.high)}]"
    return f"{_plain(value.mean)}{interval}"


def _plain(value: float) -> str:
    """Format with three digits; rounding errors of a subtraction become 0."""
    return f"{value if abs(value) > 1e-12 else 0.0:.3g}"


def dollars(value: float) -> str:
    """Format as `$1.25` or `$0.0031`; a dash for nothing."""
    if not value:
        return "-"
    return f"${value:,.2f}" if value >= 0.1 else f"${value:.2g}"


def seconds(value: float | None) -> str:
    """Format as `1.2 s` or `2:05`; a dash if the phase was not reached."""
    if value is None:
        return "-"
    if value < 120:
        return f"{value:.1f} s"
    minutes, second = divmod(round(value), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
