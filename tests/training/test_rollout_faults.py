"""What a segment does with groups that have no reward, or no samples."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
from blake3 import blake3
from rollout.model.errors import AttemptError
from rollout.model.item import DEFAULT_SPEC, Failure, Key, NewItem, Outcome
from rollout.workloads.train.config import SECTIONS
from rollout.workloads.train.policy_config import PolicySection
from rollout.workloads.train.prompts import Prompt, Prompts
from rollout.workloads.train.rollouts import Group, GroupResult, Sample
from rollout_worker.executors.port import Attempt, Child, Context, Run
from rollout_worker.executors.train_rollouts import Rollouts

FAULTY = 1
"""The place of the group in its step."""
WANTS = {"step": 0, "path": "", "hashes": {}, "written": []}


@dataclass
class Place:
    """`Context` of a segment: one of its groups is as `faulty` says, the others are well; or `every` one is so."""

    directory: Path
    faulty: Child
    every: bool = False
    groups: list[Group] = field(default_factory=list[Group])

    def progress(self, note: str, **_: Any) -> None: ...

    def hindered(self, message: str, *, code: str = "") -> None: ...

    async def put_object(self, data: bytes | Path) -> bytes:
        return blake3(data if isinstance(data, bytes) else data.read_bytes()).digest()

    async def spawn(self, items: Sequence[NewItem], *, first_ordinal: int = 0, seal: bool = True, **_: Any) -> None:
        self.groups += [Group.decode(cast(bytes, item.payload)) for item in items]

    async def children(self, from_child: int = 0, *, holds_slot: bool = False) -> AsyncIterator[Child]:
        ordinal = from_child
        while ordinal < len(self.groups):
            yield replace(self.faulty, ordinal=ordinal) if self.every or ordinal == FAULTY else drawn(ordinal)
            ordinal += 1


def drawn(ordinal: int, **fault: str) -> Child:
    samples = [Sample([5, 1], [-1.0, -2.0], "stop", seed, "x", [[0, 2]]) for seed in range(2)]
    result = GroupResult(samples, [] if fault else [[0.5, 1.0]], cast(Any, fault))
    return Child(ordinal, Outcome.DONE, result.encode(), None)


async def rows(
    tmp_path: Path, faulty: Child, *, every: bool = False, **settings: Any
) -> tuple[list[dict[str, Any]], Rollouts, Place]:
    """Of the first step, as ranks get them."""
    given: dict[str, Any] = {
        "base_model": "tiny", "dataset": "rows.jsonl", "reward": "rewards:exact", "optimizer": {"lr": 1e-3},
        "num_generations": 2, "prompts_per_step": 3, "budget": {"max_steps": 2}, "reward_timeout": 7.5,
    }  # fmt: skip
    section = cast(PolicySection, SECTIONS["grpo"].model_validate(given | settings))
    Prompts.save((Prompt(number, [2], f"row {number}", {}) for number in range(1, 7)), tmp_path / "prompts")
    run = Run("01J00000000000000000000000", "train", {})
    attempt = Attempt(Key(1, 1), 1, b"p" * 32, b"", DEFAULT_SPEC, run)
    place = Place(tmp_path, faulty, every)
    config = {"run": {"max_worker_lost": 3}, "generation": {}}
    rollouts = Rollouts(
        config, section, attempt, cast(Context, place), Prompts(tmp_path / "prompts"), None, tmp_path, end=9,
        versions=[],
    )  # fmt: skip
    answer = await rollouts.serve(dict(WANTS))
    return json.loads(Path(answer["rollouts"]).read_text())["rows"], rollouts, place


@pytest.mark.parametrize(("code", "policy"), [(c, p) for c in ("raised", "timeout") for p in ("drop_group", "zero")])
async def test_a_group_without_reward_is_left_out_or_has_zeros(tmp_path: Path, code: str, policy: str) -> None:
    found, rollouts, place = await rows(tmp_path, drawn(FAULTY, code=code, message="why"), on_reward_error=policy)
    dropped = policy == "drop_group"
    assert [row["group"] for row in found] == ([0, 0, 2, 2] if dropped else [0, 0, 1, 1, 2, 2])
    assert [row["reward"] for row in found if row["group"] != FAULTY] == [0.5, 1.0] * 2
    assert all(row["reward"] == 0.0 for row in found if row["group"] == FAULTY)
    assert rollouts.counts()["dropped" if dropped else "zeroed"] == {code: 1}
    assert rollouts.counts()["zeroed" if dropped else "dropped"] == {}
    metrics: dict[str, Any] = {"step": 1}
    rollouts.scored(metrics, [{"rewards": {}, "reward": 0, "advantage": 0}] * len(found))
    assert metrics["rewards_failed"] == 1
    faults = [json.loads(line).get("reward_fault") for line in rollouts.samples.read_text().splitlines()]
    assert faults == [f"why ({code})" if row["group"] == FAULTY and not dropped else None for row in found]
    assert {group.scoring_s for group in place.groups} == {7.5}


async def test_steps_without_a_group_end_the_run_when_they_are_many(tmp_path: Path) -> None:
    fault = drawn(0, code="raised", message="why")
    more: dict[str, Any] = {"on_reward_error": "drop_group", "budget": {"max_steps": 9}}
    found, rollouts, _ = await rows(tmp_path, fault, every=True, **more)
    assert found == [] and rollouts.counts()["dropped"] == {"raised": 3}
    with pytest.raises(AttemptError, match="why") as error:
        for step in range(1, 5):
            await rollouts.serve(WANTS | {"step": step})
    assert rollouts.counts()["dropped"] == {"raised": 15}
    assert (error.value.error_code, error.value.retry) == ("no_rewards", False)


async def test_rewards_whose_sum_is_not_finite_are_a_fault(tmp_path: Path) -> None:
    faulty = drawn(FAULTY)
    result = replace(GroupResult.decode(faulty.data, 1), rewards=[[1e308, 1.0]]).encode()
    reward = [{"function": "rewards:exact", "weight": 10.0}]
    found, rollouts, _ = await rows(tmp_path, replace(faulty, data=result), on_reward_error="drop_group", reward=reward)
    assert len(found) == 4 and rollouts.counts()["dropped"] == {"reward_invalid": 1}


async def test_a_reward_that_fails_stops_the_run_and_its_row_is_named(tmp_path: Path) -> None:
    with pytest.raises(AttemptError) as error:
        await rows(tmp_path, drawn(FAULTY, code="raised", message="reward rewards:exact raised ValueError: no"))
    assert (error.value.error_code, error.value.retry) == ("reward_failed", False)
    assert "step 1, prompt of row" in error.value.message and "rewards:exact" in error.value.message


@pytest.mark.parametrize(
    "faulty",
    [
        Child(FAULTY, Outcome.FAILED, b"", Failure("executor_crashed", "its engine died", False)),
        Child(FAULTY, Outcome.CANCELLED, b"", None),
        Child(FAULTY, Outcome.DONE, b"[]", None),
        Child(FAULTY, Outcome.DONE, GroupResult([], [[1.0]]).encode(), None),
    ],
    ids=["failed", "cancelled", "no group", "other counts"],
)
async def test_a_group_without_samples_stops_the_run(tmp_path: Path, faulty: Child) -> None:
    with pytest.raises(AttemptError) as error:
        await rows(tmp_path, faulty, on_reward_error="zero")
    assert (error.value.error_code, error.value.retry) == ("rollout_failed", False)
