"""Samples that are trials of a job task: each is a child item of the executor `job`, whose agent asks the policy.

The trial's record has what was drawn, and the reward.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from blake3 import blake3
from rollout.model.errors import InputError, InvalidResultError
from rollout.model.item import ItemSpec, NewItem, Outcome
from rollout.workloads.job.errors import policy_of
from rollout.workloads.job.record import TrialRecord
from rollout.workloads.job.trial import TrialSpec
from rollout.workloads.json_form import JsonObject
from rollout.workloads.train.policy_tasks import JOB
from rollout.workloads.train.rollouts import Group, GroupResult, TaskPlay, TrialPolicy, sample_of

from rollout_worker.backends.tokens import TextCodec
from rollout_worker.executors.port import Attempt, Child, Context
from rollout_worker.executors.rollout_scoring import Code, score

_ATTEMPTS = 3


async def trials(
    group: Group, play: TaskPlay, codec: TextCodec, attempt: Attempt, context: Context, again: bool
) -> GroupResult:
    """Return a group's samples with rewards.

    If a trial has no reward, its sample has 0 and `fault` says why; if nothing was drawn in it, there is no sample.
    `again` is that of `GroupResult`.
    """
    spec = ItemSpec(executor=JOB, max_attempts=_ATTEMPTS, max_worker_lost=attempt.spec.max_worker_lost)
    items: list[NewItem] = []
    for place, seed in enumerate(group.seeds):
        name = blake3(b"\x01trial" + attempt.id + place.to_bytes(8, "big")).digest()
        policy = asdict(_policy(group, play, seed, attempt.spec))
        trial = TrialSpec.model_validate(play.spec | {"id": name.hex(), "policy": policy}, strict=False)
        items.append(NewItem(name, trial.encode(), spec))
    await context.spawn(items, seal=False)
    found, said, rewards = GroupResult([], again=again), list[Any](), list[float | None]()
    results = context.children()
    for _ in items:
        child = await anext(results)
        record, fault = _judged(child)
        if fault:
            found.fault = found.fault or {**fault, "message": f"task {play.spec['task']}: {fault['message']}"}
        if record is None or record.policy is None:
            continue
        sample = sample_of(record.policy["sample"])
        sample.text = sample.text or codec.decode(sample.prompt, sample.ids)
        found.samples.append(sample)
        said.append(record.policy["messages"])
        rewards.append(0.0 if fault else record.result.reward)
    if found.samples:
        fault, found.fault = found.fault, {}
        scored = group.scoring is not None and group.scoring.functions
        await score(group, found, Code(attempt, context, group.scoring_s, first=len(items)), said if scored else None)
        if not found.fault:
            found.rewards.append(rewards)
        found.fault = found.fault or fault
    return found


def _policy(group: Group, play: TaskPlay, seed: int, spec: ItemSpec) -> TrialPolicy:
    return TrialPolicy(
        group.weights, seed, group.temperature, play.temperature, group.max_tokens, play.max_prompt, play.max_turns,
        group.stop, list(spec.require_labels), spec.max_worker_lost,
    )  # fmt: skip


def _judged(child: Child) -> tuple[TrialRecord | None, JsonObject]:
    """Return the record, and why it has no reward. A fault that the agent can cause has a reward, because it is the
    policy's doing; a broken verifier has none, because nothing can be learned from it."""
    record: TrialRecord | None = None
    try:
        record = TrialRecord.decode(child.data) if child.data else None
        if record is not None and record.policy is not None:
            sample_of(record.policy["sample"])
    except (InputError, InvalidResultError) as error:
        return None, {"code": "trial_invalid", "message": error.message}
    if child.outcome is not Outcome.DONE or record is None:
        failure = child.failure
        code = failure.code if failure is not None else child.outcome.name.lower()
        return record, {"code": code, "message": failure.message if failure is not None else "its trial has no result"}
    error = record.result.error
    if error is not None and policy_of(error.type).blame != "agent":
        return record, {"code": error.type, "message": error.message}
    if record.policy is None:
        why = f": {error.type}: {error.message}" if error is not None else ""
        return record, {"code": "nothing_drawn", "message": f"its agent asked nothing of the policy{why}"}
    if record.result.reward is None:
        return record, {"code": "verifier_reward_missing", "message": "its verifier gave no single reward"}
    return record, {}
