"""Groups whose samples are trials: what is spawned, and what becomes of trials without a reward."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import pytest
from rollout.model.item import DEFAULT_SPEC, Failure, ItemSpec, Key, NewItem, Outcome
from rollout.workloads.job.record import TrialRecord
from rollout.workloads.job.trial import TrialSpec
from rollout.workloads.train.rollouts import Group, GroupResult, TaskPlay, TrialPolicy, Weights
from rollout_worker.executors.port import Attempt, Child, Context, Run
from rollout_worker.executors.rollout_trials import trials

TASK = {
    "id": "",
    "dataset": "dataset",
    "task": "sort",
    "checksum": "00",
    "dialect": "rollout",
    "agent": "a",
    "attempt": 1,
}
GROUP = Group(0, 0, [1], [5, 6], 30, Weights(2, "aa"), 0.0, [9], trial=TaskPlay(TASK, 4, 20, 0.7))
TIMES = dict.fromkeys(("total_sec", "environment_setup_sec", "agent_setup_sec", "agent_execution_sec"), 0.0)
ENDED = "2026-01-01T00:00:00Z"


class Codec:
    def decode(self, prompt: list[int], ids: list[int]) -> str:
        return f"text of {ids}"


def record(reward: float | None = 1.0, error: str = "", *, drew: bool = True, text: str = "") -> bytes:
    sample = {"ids": [3, 4], "logprobs": [-1.0, 0.0], "finish_reason": "length", "seed": 5, "text": text,
              "versions": [[2, 2]], "learnt": [1, 0], "prompt": [7]}  # fmt: skip
    policy = {"sample": sample, "messages": [{"role": "assistant", "content": text}], "turns": 1, "others": 0}
    result: dict[str, Any] = {
        "task_name": "sort", "dataset_name": "dataset", "agent_name": "a", "attempt": 1, "task_git_commit_id": None,
        "reward": reward, "cost": 0.0, "error": {"type": error, "message": "why"} if error else None,
        "durations": {**TIMES, "verifier_sec": None}, "timestamps": {"started_at": ENDED, "ended_at": ENDED},
    }  # fmt: skip
    found = TrialRecord.model_validate(
        {"trial": "00", "result": result, "policy": policy if drew else None}, strict=False
    )
    return found.encode()


class Family:
    def __init__(self, *results: Child) -> None:
        self.results, self.items = results, list[NewItem]()

    async def spawn(self, items: Sequence[NewItem], *, first_ordinal: int = 0, seal: bool = True, **_: Any) -> None:
        assert first_ordinal == 0 and not seal
        self.items = list(items)

    async def children(self, from_child: int = 0, *, holds_slot: bool = False) -> AsyncIterator[Child]:
        for child in self.results[from_child:]:
            yield child


async def played(*results: Child) -> tuple[GroupResult, list[NewItem]]:
    family = Family(*results)
    spec = ItemSpec(executor="rollout", require_labels=(("role", "draw"),), max_worker_lost=4)
    attempt = Attempt(Key(1, 0), 1, b"g" * 32, GROUP.encode(), spec, Run("r", "train", {}))
    assert GROUP.trial is not None
    found = await trials(GROUP, GROUP.trial, cast(Any, Codec()), attempt, cast(Context, family), False)
    return GroupResult.decode(found.encode(), 1), family.items


def done(place: int, data: bytes) -> Child:
    return Child(place, Outcome.DONE, data, None)


async def test_a_sample_is_what_its_trial_recorded() -> None:
    found, items = await played(done(0, record(0.5)), done(1, record(1.0, "agent_execution_failed", text="said")))
    assert not found.fault and found.rewards == [[0.5, 1.0]], "what an agent fails at is the policy's own doing"
    one, two = found.samples
    assert (one.ids, one.learnt, one.prompt, one.text, two.text) == ([3, 4], [1, 0], [7], "text of [3, 4]", "said")
    for item, seed in zip(items, GROUP.seeds, strict=True):
        spec = TrialSpec.decode(cast(bytes, item.payload))
        assert (item.spec.executor, spec.task, spec.id) == ("job", "sort", item.id.hex()) and spec.policy is not None
        policy = TrialPolicy.of(spec.policy)
        assert (policy.seed, policy.temperature, policy.named, policy.stop) == (seed, 0.0, 0.7, [9])
        assert (policy.labels, policy.max_worker_lost, policy.max_tokens) == ([("role", "draw")], 4, 30)
    assert items[0].id != items[1].id and items[0].spec != DEFAULT_SPEC


@pytest.mark.parametrize(
    ("child", "code", "drew"),
    [
        (done(1, record(0.0, "verifier_timeout")), "verifier_timeout", True),
        (done(1, record(None)), "verifier_reward_missing", True),
        (done(1, record(1.0, drew=False)), "nothing_drawn", False),
        (done(1, b"{}"), "trial_invalid", False),
        (Child(1, Outcome.FAILED, record(None, "environment_lost"), Failure("environment_lost", "why", True)),
         "environment_lost", True),
        (Child(1, Outcome.FAILED, b"", Failure("worker_lost", "why", True)), "worker_lost", False),
    ],
)  # fmt: skip
async def test_a_trial_without_a_reward_is_told_with_its_task(child: Child, code: str, drew: bool) -> None:
    found, _ = await played(done(0, record(1.0)), child)
    assert found.fault["code"] == code and found.fault["message"].startswith("task sort: ")
    assert len(found.samples) == 1 + drew and found.rewards == [[1.0, 0.0][: 1 + drew]]
