"""The outcome of a trial: turns rewards and errors into the record, and decides whether it counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout.workloads.job.errors import policy_of
from rollout.workloads.job.record import StepRecord, TrialRecord, Usage
from rollout.workloads.job.results import TrialError, TrialResult
from rollout.workloads.job.rewards import REWARD, Rewards, combine, single

from rollout_worker.trials.masking import Masks
from rollout_worker.trials.port import TrialFault, UsageCount
from rollout_worker.trials.times import Times
from rollout_worker.trials.told import Told

MESSAGE_MAX = 4000
TEARDOWN = "environment_teardown_failed"


@dataclass(slots=True)
class StepOutcome:
    name: str
    rewards: Rewards | None = None
    error: TrialFault | None = None


@dataclass(slots=True)
class Outcome:
    """`error` is the trial's own; errors of steps that do not end it are in `steps`. `is_cut` means that an agent's
    error prevented later steps."""

    times: Times = field(default_factory=Times)
    usage: UsageCount = field(default_factory=UsageCount)
    steps: list[StepOutcome] = field(default_factory=list[StepOutcome])
    error: TrialFault | None = None
    is_cut: bool = False
    remarks: list[str] = field(default_factory=list[str])
    agent_version: str = ""
    environment_cost_usd: float = 0.0
    preserved: str = ""
    network: str = ""


@dataclass(frozen=True, slots=True)
class Counted:
    """`error` is None if there was none. `is_valid` means that the rewards are the agent's score, or that there was no
    verification."""

    rewards: Rewards | None
    error: TrialFault | None
    is_valid: bool


def count(told: Told, outcome: Outcome) -> Counted:
    """Return error and rewards of the trial, by the table of errors."""
    rewards = combine(_scored(told, outcome), told.task.reward_strategy) or None
    error = outcome.error
    if error is None or error.type == TEARDOWN:  # what is left behind does not cover why there is no reward
        error = _error_of_steps(outcome.steps, rewards) or error
    if error is None:
        return Counted(rewards, None, True)
    policy = policy_of(error.type, told.job.override_error_policy)
    if policy.valid_reward and rewards is None and not told.job.verifier.disable:
        rewards = {REWARD: 0.0}
    return Counted(rewards, error, policy.valid_reward)


def _scored(told: Told, outcome: Outcome) -> list[Rewards | None]:
    """Return the rewards of each step. If an agent can cause that a step has none, it has 0 of each, and so has a step
    that was not started for the same reason: otherwise breaking a step would exclude it from the mean."""
    overrides = told.job.override_error_policy

    def is_zero(error: TrialFault | None) -> bool:
        return error is not None and policy_of(error.type, overrides).valid_reward

    found = [{} if step.rewards is None and is_zero(step.error) else step.rewards for step in outcome.steps]
    ended = outcome.error if outcome.error is not None and outcome.error.type != TEARDOWN else None
    if outcome.is_cut:
        ended = ended or (outcome.steps[-1].error if outcome.steps else None)
    if outcome.steps and is_zero(ended) and told.regrade is None:
        found += [{} for _ in told.task.steps[len(found) :]]
    return found


def _error_of_steps(steps: Sequence[StepOutcome], rewards: Rewards | None) -> TrialFault | None:
    """Return the first error; that of a verifier only if the whole trial has no rewards."""
    errors = [step.error for step in steps if step.error is not None]
    if rewards is None:
        return errors[-1] if errors else None
    return next((error for error in errors if policy_of(error.type).blame != "verifier"), None)


def record_of(told: Told, outcome: Outcome, counted: Counted, files: bytes | None) -> TrialRecord:
    durations, timestamps = outcome.times.result()
    usage = usage_of(outcome.usage)
    cost = outcome.environment_cost_usd + (usage.cost_usd or 0.0)
    error = counted.error
    result = TrialResult(
        task_name=told.spec.task,
        dataset_name=told.spec.dataset,
        agent_name=told.section.id,
        attempt=told.spec.attempt,
        task_git_commit_id=told.spec.commit,
        reward=single(counted.rewards) if counted.is_valid else None,
        cost=max(0.0, cost),
        error=None if error is None else TrialError(type=error.type, message=_message(error, told.masks)),
        durations=durations,
        timestamps=timestamps,
    )
    steps = [
        StepRecord(
            name=step.name,
            rewards=step.rewards,
            error=None if step.error is None else (step.error.type, _message(step.error, told.masks)),
        )
        for step in outcome.steps
    ]
    return TrialRecord(
        trial=told.spec.id,
        result=result,
        rewards=counted.rewards,
        steps=steps if told.task.has_steps else [],
        files=None if files is None else files.hex(),
        usage=usage,
        agent_version=outcome.agent_version,
        provider=told.provider.name,
        environment_cost_usd=outcome.environment_cost_usd,
        remarks=[told.masks.text(remark) for remark in dict.fromkeys(outcome.remarks)],
        preserved=outcome.preserved,
        network=outcome.network,
    ).well_formed()


def _message(error: TrialFault, masks: Masks) -> str:
    return masks.text(error.message)[:MESSAGE_MAX]


def usage_of(count: UsageCount) -> Usage:
    return Usage(
        n_input_tokens=count.input_tokens,
        n_cache_tokens=count.cached_tokens,
        n_output_tokens=count.output_tokens,
        cost_usd=count.cost_usd,
        models={name: usage_of(one) for name, one in count.models.items()},
    )
