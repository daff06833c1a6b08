"""A job as a run: its configuration, lanes and items, and the conditions that end it early."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil

from blake3 import blake3

from rollout.model.item import ItemSpec, NewItem
from rollout.model.run import Lane, Order, Policy
from rollout.workloads.job.config import JobConfig, asks_engine
from rollout.workloads.job.engine import ResolvedEngine
from rollout.workloads.job.errors import ERRORS, is_infrastructure, policy_of
from rollout.workloads.job.plan import Trial
from rollout.workloads.job.spending import MICRO
from rollout.workloads.job.trial import TrialSpec
from rollout.workloads.json_form import JsonObject

PAUSE_TIMEOUT_MS = 30 * 86_400_000
"""A trial that runs when a job ends early is waited for, however long it takes."""
NO_FAULT = "by no fault of an agent"
"""Part of the reason of a run in which too many trials failed so."""
_OF_NO_EXECUTOR = ("worker_lost", "executor_error", "timeout")
"""Codes of failures of workers and processes, which no executor raised."""


def job_json(job: JobConfig) -> JsonObject:
    return job.model_dump(mode="json")


def digest_of(ids: Iterable[bytes]) -> str:
    """Hash the ids of trials in order."""
    digest = blake3()
    for one in ids:
        digest.update(one)
    return digest.hexdigest()


def set_trials(config: JsonObject, trials: Sequence[Trial]) -> None:
    """Put the trials of the run into its configuration."""
    config["input"] = {"digest": digest_of(trial.id for trial in trials), "trials": len(trials)}
    config["trees"] = {trial.task.checksum: trial.task.checksum for trial in trials}


def run_config(job: JobConfig, trials: Sequence[Trial], engine: ResolvedEngine | None = None) -> JsonObject:
    """Return the run's configuration. `engine` is the one that agents query."""
    config: JsonObject = {
        "run": {"name": job.name or "", "order": str(Order.ARRIVAL), "max_in_flight": job.n_concurrent_trials},
        "job": job_json(job),
        **({"executors": {"infer": engine.config}} if engine is not None else {}),
    }
    set_trials(config, trials)
    return config


def lanes(job: JobConfig) -> tuple[Lane, ...]:
    """Return a lane for each agent or group of agents, with its limit.

    An agent that queries engines of the cluster has none: while its trial waits for an answer, another trial would take
    its place in the lane and wait for a sandbox, which the first one occupies, and neither could continue.
    """
    limits = {agent.lane: 0 if asks_engine(agent, job) else agent.n_concurrent or 0 for agent in job.agents}
    return tuple(Lane(*pair) for pair in limits.items())


def policies(job: JobConfig, used: JsonObject) -> tuple[Policy, ...]:
    """Return the conditions after which no trial starts. `used` is what earlier runs of the job used of its budget."""
    budget, infrastructure = job.budget, job.infrastructure
    limits: list[tuple[str, str]] = []
    if budget.max_tokens is not None:
        limits += [("units_in", str(budget.max_tokens)), ("used_in", str(used.get("tokens", 0))), ("unit_in", "tokens")]
    if budget.max_cost_usd is not None:
        limits += [("units_out", str(ceil(budget.max_cost_usd * MICRO))), ("unit_out", "$")]
        limits.append(("used_out", str(used.get("micro_dollars", 0))))
    if budget.max_wall_time_sec is not None:
        limits += [("wall_s", str(ceil(budget.max_wall_time_sec))), ("used_s", str(int(used.get("seconds", 0))))]
    if infrastructure.min_success_rate > 0:
        codes = [name for name in ERRORS if is_infrastructure(policy_of(name, job.override_error_policy))]
        limits += [
            ("codes", ",".join([*codes, *_OF_NO_EXECUTOR])),
            ("min_percent", str(ceil(infrastructure.min_success_rate * 100))),
            ("after", str(infrastructure.after_trials)),
            ("items", "trials"),
            ("fault", NO_FAULT),
            ("rate", f"infrastructure.min_success_rate {infrastructure.min_success_rate:g}"),
        ]
    return (Policy("skip_rest", tuple(limits)),) if limits else ()


def item_of(trial: Trial, job: JobConfig, regrade: str | None = None) -> NewItem:
    """Return the item of a trial. `regrade` is that of `TrialSpec`."""
    spec = TrialSpec(
        id=trial.id.hex(),
        dataset=trial.dataset,
        task=trial.task.name,
        checksum=trial.task.checksum,
        dialect=trial.task.dialect_name,
        commit=trial.task.git_commit_id,
        agent=trial.agent.id,
        attempt=trial.attempt,
        regrade=regrade,
    )
    return NewItem(trial.id, spec.encode(), _spec(job, trial.agent.lane))


def _spec(job: JobConfig, lane: str) -> ItemSpec:
    return ItemSpec(
        lane=lane, max_attempts=job.retry.max_attempts, retry_backoff_ms=min(job.retry.initial_delay_ms, 60_000)
    )
