"""Two processes train as one does, for every algorithm, each with the whole model or with a share of it.

One group of two processes does all jobs, while this one does the same jobs alone: starting a group takes ten seconds.
Two epochs of nine rows, eight a step: of the last step's two rows one of the processes has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from rollout.snapshots.export import export_model
from rollout.workloads.train.config import SECTIONS, Kind, TrainingSection
from rollout.workloads.train.policy_config import PolicySection
from training_jobs import Done, alike, job, processes, same_bytes, settings_of, tokens, train

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*will be removed in v6:FutureWarning"),
]

POLICIES = {kind for kind in get_args(Kind) if issubclass(SECTIONS[kind], PolicySection)}
KINDS: list[Kind] = [kind for kind in get_args(Kind) if kind not in POLICIES]
SAMPLES = {"prompts_per_step": 3, "num_generations": 2, "num_iterations": 2}
LORA = {"lora": {"r": 4}}
JOBS: dict[str, tuple[Kind, dict[str, Any], tuple[str, ...]]] = {
    **{kind: (kind, {}, ("ddp", "fsdp")) for kind in KINDS},
    "dpo-lora": ("dpo", LORA, ("fsdp",)),
    "rm-lora": ("rm", LORA, ("ddp",)),
    "packed": ("sft", {"packing": {"kind": "best_fit"}, "budget": {"max_steps": 3}}, ("ddp", "fsdp")),
    "grpo": ("grpo", {**SAMPLES, "beta": 0.1}, ("ddp", "fsdp")),
    "ppo": ("ppo", {**SAMPLES, "value": "head"}, ("ddp", "fsdp")),
    "tied": ("sft", {"gradient_checkpointing": True}, ("fsdp",)),
}
PLACES = [(name, strategy) for name, (_, _, strategies) in JOBS.items() for strategy in strategies]


def dataset(name: str) -> str:
    return name if name == "packed" else JOBS[name][0]


@pytest.fixture(scope="module")
def outcomes(tiny: Path, tied: Path, rewarding: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of each job a directory: its name, and with the strategy behind it."""

    def made(name: str, **more: Any) -> TrainingSection:
        kind, own, _ = JOBS[name]
        judge = {"reward": [{"model": str(rewarding), "weight": 0.5, "name": "judge"}]} if kind in POLICIES else {}
        return settings_of(kind, tied if name == "tied" else tiny, **judge, **own, **more)

    base = tmp_path_factory.mktemp("jobs")
    two: list[dict[str, Any]] = []
    for name, strategy in PLACES:
        kind, model = JOBS[name][0], tied if name == "tied" else tiny
        settings = made(name, minibatch_size=2, devices=2, strategy=strategy)
        data = tokens(kind, model, base / f"{dataset(name)}.tokens", pack=64 if name == "packed" else None)
        again = "yes" if strategy == "fsdp" else ""
        two.append(job(kind, settings, data, base / f"{name}-{strategy}", again=again))
    with processes(2, two, base):
        for name, (kind, _, _) in JOBS.items():
            train(kind, made(name), base / f"{dataset(name)}.tokens", base / name)
    yield base


@pytest.mark.parametrize(("name", "strategy"), PLACES)
def test_two_processes_train_as_one(outcomes: Path, name: str, strategy: str) -> None:
    one, two = Done.read(outcomes / name), Done.read(outcomes / f"{name}-{strategy}")
    assert [line["step"] for line in one.metrics] == [1, 2, 3]
    assert alike(one, two) == []
    if name == "kto":
        assert one.metrics[1]["kl"] > 0, "else its pairing has no effect"


@pytest.mark.parametrize("name", [name for name, strategy in PLACES if strategy == "fsdp"])
def test_with_fsdp_each_holds_half_and_a_snapshot_is_whole(outcomes: Path, name: str) -> None:
    """And is taken up again to the byte."""
    done = Done.read(outcomes / f"{name}-fsdp")
    assert all(share < 0.6 for share in done.held), "a process holds its share only, of the reference, too"
    assert len(done.held) == (2 if name in ("dpo", "ipo", "kto", "grpo", "ppo") else 1)
    assert same_bytes(done.state, outcomes / f"{name}-fsdp" / "again")


def test_with_ddp_each_has_random_numbers_of_its_own(outcomes: Path) -> None:
    state = outcomes / "sft-ddp" / "state"
    assert (state / "random-00000.safetensors").read_bytes() != (state / "random-00001.safetensors").read_bytes()


def test_the_export_of_a_sharded_model_loads(outcomes: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    done = Done.read(outcomes / "sft-fsdp")
    export_model(done.state, tmp_path / "model")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert all(loaded.state_dict()[name].equal(tensor) for name, tensor in done.weights.items())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_three_processes_go_on_to_the_byte(tiny: Path, tmp_path: Path, strategy: str) -> None:
    """Sums over more than two depend on the order, which must not depend on where a process began."""
    settings = settings_of("sft", tiny, minibatch_size=2, devices=3, strategy=strategy, budget={"max_steps": 6})
    data = tokens("sft", tiny, tmp_path / "tokens")
    calm = job("sft", settings, data, tmp_path / "calm")
    broken = job("sft", settings, data, tmp_path / "broken", steps=3, again="on")
    with processes(3, [calm, broken], tmp_path):
        pass
    assert same_bytes(tmp_path / "calm" / "state", tmp_path / "broken" / "on")
