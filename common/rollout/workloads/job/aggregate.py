"""Computes the results of a job from those of its trials: what is counted, and the denominator of each rate.

Each planned trial is one of
- completed: it has a valid reward, or was not to be verified;
- failed: it ended with an error, and has no valid reward;
- skipped: it did not run, because the job was stopped or its budget was used up.

Of the failed ones, `infrastructure` counts those that say nothing about the agent, by the table of errors.

*Scored* are the trials that say something about the agent: those with a valid reward, and with a reward of 0 those that
failed by the agent's own doing before it could be verified. Pass rate, mean reward, pass@k and metrics are over the
scored trials, so that neither an outage nor a broken verifier is ever counted as an agent's failure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from rollout.model.errors import ConfigError, InputError
from rollout.workloads.job.averages import mean
from rollout.workloads.job.config import MetricSection
from rollout.workloads.job.errors import PolicyOverride, is_infrastructure, policy_of
from rollout.workloads.job.intervals import Estimate, estimate, group
from rollout.workloads.job.metrics import compute, metric_name
from rollout.workloads.job.pass_at_k import PASS, PassAtK, pass_at_each_k
from rollout.workloads.job.results import AgentSummary, JobResult, TrialResult, TrialSummary
from rollout.workloads.job.rewards import REWARD, Rewards

Overrides = Mapping[str, PolicyOverride]


@dataclass(frozen=True, slots=True)
class PlannedTrial:
    """A planned trial. `result` is None if it was skipped or has not ended. `rewards` has all of them, if the verifier
    left several."""

    task_name: str
    dataset_name: str
    agent_name: str
    attempt: int
    result: TrialResult | None = None
    rewards: Rewards | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """The denominators: total = completed + failed + skipped; infrastructure is part of failed."""

    total: int
    completed: int
    failed: int
    skipped: int
    infrastructure: int
    scored: int
    tasks: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of an agent in a dataset; None if no trial was scored. `metric_errors` says, by name, why a metric has
    no value."""

    counts: Counts
    pass_rate: Estimate | None
    mean_reward: Estimate | None
    pass_at_k: tuple[PassAtK, ...]
    metrics: Mapping[str, float]
    metric_errors: Mapping[str, str]
    errors: Mapping[str, int]


def is_completed(result: TrialResult, overrides: Overrides) -> bool:
    if result.error is None:
        return True
    return result.reward is not None and policy_of(result.error.type, overrides).valid_reward


def score(result: TrialResult, overrides: Overrides) -> float | None:
    """Return the agent's score in the trial, or None if the trial says nothing about the agent."""
    if result.error is None:
        return result.reward  # None: not to be verified
    if not policy_of(result.error.type, overrides).valid_reward:
        return None
    return result.reward if result.reward is not None else 0.0


def counts(trials: Sequence[PlannedTrial], overrides: Overrides) -> Counts:
    results = [trial.result for trial in trials if trial.result is not None]
    completed = sum(is_completed(result, overrides) for result in results)
    failed = [result for result in results if not is_completed(result, overrides)]
    return Counts(
        total=len(trials),
        completed=completed,
        failed=len(failed),
        skipped=len(trials) - len(results),
        infrastructure=sum(
            is_infrastructure(policy_of(result.error.type, overrides)) for result in failed if result.error is not None
        ),
        scored=sum(score(result, overrides) is not None for result in results),
        tasks=len({(trial.dataset_name, trial.task_name) for trial in trials}),
    )


def scores_by_task(trials: Sequence[PlannedTrial], overrides: Overrides) -> dict[tuple[str, str], list[float]]:
    """Return the scores of scored trials in order, by (dataset, task)."""
    found: dict[tuple[str, str], list[float]] = {}
    for trial in trials:
        value = None if trial.result is None else score(trial.result, overrides)
        if value is not None:
            found.setdefault((trial.dataset_name, trial.task_name), []).append(value)
    return found


def statistics(
    trials: Sequence[PlannedTrial], overrides: Overrides, metrics: Sequence[MetricSection] = ()
) -> Statistics:
    """Return the statistics of `trials`, those of one agent in one dataset."""
    groups = group((task, value) for task, values in scores_by_task(trials, overrides).items() for value in values)
    passed = {task: [float(value >= PASS) for value in values] for task, values in groups.items()}
    rewards = [_rewards(trial) for trial in trials if trial.result and score(trial.result, overrides) is not None]
    errors: dict[str, int] = {}
    for trial in trials:
        if trial.result is not None and trial.result.error is not None:
            errors[trial.result.error.type] = errors.get(trial.result.error.type, 0) + 1
    values, failed = dict[str, float](), dict[str, str]()
    for metric in metrics:
        try:
            values |= compute(metric, rewards)
        except (ConfigError, InputError) as error:
            failed[metric_name(metric)] = error.message
    return Statistics(
        counts=counts(trials, overrides),
        pass_rate=estimate(passed),
        mean_reward=estimate(groups),
        pass_at_k=tuple(pass_at_each_k(groups)),
        metrics=values,
        metric_errors=failed,
        errors=dict(sorted(errors.items())),
    )


def _rewards(trial: PlannedTrial) -> Rewards | None:
    if trial.rewards is not None:
        return trial.rewards
    reward = None if trial.result is None else trial.result.reward
    return None if reward is None else {REWARD: reward}


def job_statistics(
    trials: Sequence[PlannedTrial], overrides: Overrides, metrics: Sequence[MetricSection] = ()
) -> dict[tuple[str, str], Statistics]:
    """Return statistics by (agent, dataset), in the order of `trials`: the content of stats.json."""
    groups: dict[tuple[str, str], list[PlannedTrial]] = {}
    for trial in trials:
        groups.setdefault((trial.agent_name, trial.dataset_name), []).append(trial)
    return {key: statistics(group, overrides, metrics) for key, group in groups.items()}


def job_result(
    job_name: str,
    trials: Sequence[PlannedTrial],
    *,
    started_at: datetime,
    ended_at: datetime,
    cancelled: bool,
    overrides: Overrides,
) -> JobResult:
    """Return result.json of the job for all planned `trials`, in order. A rate over no trials is 0 there, because the
    field cannot be null: stats.json has the denominators."""
    all_of = _summary(trials, overrides)
    agents: dict[str, list[PlannedTrial]] = {}
    for trial in trials:
        agents.setdefault(trial.agent_name, []).append(trial)
    return JobResult(
        job_name=job_name,
        cancelled=cancelled,
        total_trials=all_of.total_trials,
        completed_trials=all_of.completed_trials,
        failed_trials=all_of.failed_trials,
        skipped_trials=counts(trials, overrides).skipped,
        pass_rate=all_of.pass_rate,
        mean_reward=all_of.mean_reward,
        total_cost=all_of.total_cost,
        total_duration_sec=max(0.0, (ended_at - started_at).total_seconds()),
        started_at=started_at,
        ended_at=ended_at,
        agents={name: _summary(group, overrides) for name, group in agents.items()},
        results=[
            TrialSummary(
                task_name=trial.task_name,
                dataset_name=trial.dataset_name,
                agent_name=trial.agent_name,
                attempt=trial.attempt,
                reward=None if trial.result is None else trial.result.reward,
            )
            for trial in trials
        ],
    )


def _summary(trials: Sequence[PlannedTrial], overrides: Overrides) -> AgentSummary:
    found = counts(trials, overrides)
    scores = [value for values in scores_by_task(trials, overrides).values() for value in values]
    return AgentSummary(
        total_trials=found.total,
        completed_trials=found.completed,
        failed_trials=found.failed,
        pass_rate=mean([float(value >= PASS) for value in scores]) if scores else 0.0,
        mean_reward=mean(scores) if scores else 0.0,
        total_cost=math.fsum(trial.result.cost for trial in trials if trial.result is not None),
    )
