"""samples.jsonl and what is said of a run of reinforcement learning: from results of segments, whatever was killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rollout.model.errors import InvalidResultError, NotFoundError
from rollout.model.item import Outcome
from rollout.workloads.commit import CommitEntry
from rollout.workloads.port import ArtifactWriter, FailedTry, Remembering, Totals
from rollout.workloads.train.commands.samples import chosen
from rollout.workloads.train.health import WINDOW, Watch, warnings_of
from rollout.workloads.train.lines import TrainWriter, outcome, tier
from rollout.workloads.train.samples import SAMPLES, sample_lines
from rollout.workloads.train.segment import NO_ROLLOUTS, Result, Segment, timeless

CONFIG: dict[str, Any] = {
    "algorithm": {"kind": "grpo"},
    "model": {"uri": "base"},
    "executors": {"rollout": {"backend": {"kind": "transformers", "device": "cpu"}}},
}


def sample(step: int, reward: float | None = 1.0, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "group": 0, "number": 3, "prompt": "41=", "completion": "14", "completion_ids": [5, 6, 1],
        "rewards": {"exact": reward}, "reward": reward, "advantage": 0.5, "policy_version": step - 1,
        "finish_reason": "stop",
    } | more  # fmt: skip


def metrics(step: int, reward: float = 0.5, **more: float) -> dict[str, Any]:
    return {"step": step, "loss": 0.1, "reward": reward, "reward_std": 0.2} | more


class Store:
    """A ledger of objects."""

    def __init__(self) -> None:
        self.objects: dict[bytes, bytes] = {}

    def put(self, samples: list[dict[str, Any]]) -> str:
        name = bytes([len(self.objects) + 1]) * 32
        self.objects[name] = b"".join(json.dumps(one).encode() + b"\n" for one in samples)
        return name.hex()

    async def fetch(self, object_id: bytes, path: Path) -> None:
        if object_id not in self.objects:
            raise NotFoundError("no such object")
        path.write_bytes(self.objects[object_id])

    async def failed_tries(self, seq: int) -> list[FailedTry]:
        return []


def entry(seq: int, result: Result, first: int) -> CommitEntry:
    payload = Segment("segment", first, result.step - first).encode()
    return CommitEntry(seq - 1, seq, 1, Outcome.DONE, result.encode(), payload, bytes(32))


async def written(writer: TrainWriter, entries: list[CommitEntry], store: Store) -> tuple[list[bytes], list[str]]:
    """(lines of samples.jsonl, what was said)."""
    lines: list[bytes] = []
    said: list[str] = []
    for one in entries:
        said.append(await writer.place(one, store))
        lines += [line for name, line in writer.lines(one) if name == SAMPLES]
    return lines, said


def segments(store: Store) -> list[CommitEntry]:
    made: list[CommitEntry] = []
    for seq, (first, last) in enumerate([(0, 2), (2, 3)], 1):
        steps = range(first + 1, last + 1)
        result = Result(
            step=last, steps=3, metrics=[metrics(n, reward=n / 4) for n in steps],
            samples=store.put([sample(n, reward=n / 4) for n in steps for _ in range(2)]),
            rollouts=NO_ROLLOUTS
            | {"generated": 4, "regenerated": first, "dropped": {"reward_failed": 1}, "devices": ["cpu"]},
        )  # fmt: skip
        made.append(entry(seq, result, first))
    return made


async def test_samples_are_in_order_and_the_same_when_they_are_placed_again(tmp_path: Path) -> None:
    store = Store()
    entries = segments(store)
    writer = TrainWriter(CONFIG)
    assert isinstance(writer, ArtifactWriter) and isinstance(writer, Remembering) and SAMPLES in writer.files
    writer.open(tmp_path)
    for one in entries:  # of a command that was killed before their lines were written
        await writer.place(one, store)
    again = TrainWriter(CONFIG)
    again.open(tmp_path)
    assert await written(again, entries, store) == await written(writer, entries, store)
    lines, said = await written(again, entries, store)
    assert [json.loads(line)["step"] for line in lines] == [1, 1, 2, 2, 3, 3] and said == ["", ""]
    assert json.loads(lines[0]) == sample(1, reward=0.25)
    again.refresh("completed")
    assert list(tmp_path.iterdir()) == []


async def test_the_summary_counts_rollouts_and_has_the_reward(tmp_path: Path) -> None:
    store = Store()
    writer = TrainWriter(CONFIG)
    writer.open(tmp_path)
    await written(writer, segments(store), store)
    summary = writer.summary({"durations": {"wall_s": 1.0}, "tokens_per_s": 1.0}, Totals())
    assert {name: summary[name] for name in ("tier", "first_reward", "final_reward", "rollouts", "warnings")} == {
        "tier": "regenerate",
        "first_reward": 0.25,
        "final_reward": 0.75,
        "rollouts": NO_ROLLOUTS
        | {"generated": 8, "regenerated": 2, "dropped": {"reward_failed": 2}, "devices": ["cpu"]},
        "warnings": [],
    }
    assert "0.250" in outcome(summary) and "0.750" in outcome(summary)
    json.dumps(writer.memory)
    other = {**CONFIG, "executors": {"rollout": {"backend": {"kind": "vllm", "device": "cuda"}}}}
    assert tier(other, []) == "replay"
    anywhere = {**CONFIG, "executors": {"rollout": {"backend": {"kind": "transformers", "device": None}}}}
    assert tier(anywhere, []) == tier(anywhere, ["cpu", "cuda"]) == "replay" and tier(anywhere, ["cpu"]) == "regenerate"


async def test_samples_that_are_gone_or_none_are_said_and_the_rest_is_written(tmp_path: Path) -> None:
    store = Store()
    entries = segments(store)
    first, second = store.objects
    del store.objects[first]
    store.objects[second] = b'{"step": 3}\n'
    writer = TrainWriter(CONFIG)
    writer.open(tmp_path)
    lines, said = await written(writer, entries, store)
    assert lines == [] and all(said)
    assert writer.memory["last"]["step"] == 3


async def test_a_run_of_supervised_training_has_no_samples(tmp_path: Path) -> None:
    writer = TrainWriter({**CONFIG, "algorithm": {"kind": "sft"}})
    writer.open(tmp_path)
    assert SAMPLES not in writer.files
    summary = writer.summary({}, Totals())
    assert "tier" not in summary and "rollouts" not in summary


@pytest.mark.parametrize(
    "fields",
    [{"samples": "no hash"}, {"rollouts": {"generated": 1}}, {"rollouts": {**Result().rollouts, "dropped": []}}],
)
def test_a_result_with_other_fields_is_none(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidResultError):
        Result.decode(Result(**fields).encode())


def test_times_and_rates_are_no_part_of_what_is_compared() -> None:
    line = {"step": 1, "loss": 0.5, "seconds": 1.0, "seconds/generation": 0.5, "tokens_per_s": 9.0}
    assert timeless(line) == {"step": 1, "loss": 0.5}


def test_a_sample_for_people_has_every_part_of_its_reward() -> None:
    both = sample(7, 0.75, rewards={"exact": 0.0, "digits": 0.75}, finish_reason="length")
    text = "\n".join(sample_lines(both))
    for part in ("step 7", "reward 0.750", "advantage +0.500", "exact 0.000", "digits 0.750", "cut off", "41=", "14"):
        assert part in text
    chat = sample(7, None, prompt=[{"role": "user", "content": "what is\n41?"}])
    assert "user: what is" in "\n".join(sample_lines(chat))


def test_the_best_and_the_worst_of_those_that_were_judged() -> None:
    ones = [sample(n, reward) for n, reward in enumerate([0.5, None, 1.0, 0.5, 0.0])]
    assert [one["step"] for one in chosen(ones, 3, None)] == [2, 0, 3]
    assert [one["step"] for one in chosen(ones, None, 2)] == [4, 0]
    assert chosen(ones, None, None) == ones


HEALTHY = {"frac_reward_zero_std": 0.2, "kl": 0.01, "entropy": 1.0, "completions/clipped_ratio": 0.1}
SIGNS: dict[str, list[dict[str, Any]]] = {
    "": [metrics(n, n / 20, **HEALTHY) for n in range(20)],
    "reward_zero": [metrics(n, 0.0, reward_std=0.0) for n in range(5)],
    "reward_constant": [metrics(n, 1.0, reward_std=0.0) for n in range(10)],
    "kl_high": [metrics(n, n / 20, **(HEALTHY | {"kl": 0.01 if n < 10 else 3.0})) for n in range(20)],
    "kl_high ": [
        metrics(n, n / 20, **{"objective/kl": 0.1 * 2**n, "completions/mean_length": 10.0}) for n in range(12)
    ],
    "entropy_low": [metrics(n, 0.5, **(HEALTHY | {"entropy": 1.0 / (1 + n) ** 2})) for n in range(20)],
    "zero_variance": [metrics(n, n / 20, **(HEALTHY | {"frac_reward_zero_std": 0.9})) for n in range(20)],
    "cut_off": [metrics(n, n / 20, **(HEALTHY | {"completions/clipped_ratio": 0.7})) for n in range(20)],
}


@pytest.mark.parametrize("code", SIGNS)
def test_signs_of_a_run_that_learns_nothing(code: str) -> None:
    assert [one.code for one in warnings_of(SIGNS[code])] == code.split()


def test_rewards_that_differ_between_groups_of_one_sample_are_not_constant() -> None:
    lines = [metrics(n, 0.5, reward_std=0.0, **{"rewards/exact/std": 0.5}) for n in range(20)]
    assert warnings_of(lines) == []


def test_the_entropy_of_a_policy_that_learns_may_fall() -> None:
    falling = [metrics(n, n / 20, **(HEALTHY | {"entropy": 1.0 / (1 + n) ** 2})) for n in range(20)]
    assert warnings_of(falling) == []


def test_a_sign_is_told_when_it_begins_and_again_when_it_comes_back() -> None:
    watch = Watch(memory := {})
    zeros, good = SIGNS["reward_zero"], SIGNS[""]
    told = [[one.code for one in watch.add(lines)] for lines in (zeros[:3], zeros, zeros, good, zeros)]
    assert told == [[], ["reward_zero"], [], [], ["reward_zero"]]
    watch.add(good * 10)
    assert len(memory["recent"]) == WINDOW
    assert len(json.dumps(memory)) < 20_000
