"""A run that goes on from a snapshot ends in the bytes of one that never stopped, and each part of it is needed for it.

With dropout and a changing learning rate: without them, generators and schedule could be forgotten and nobody would see.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_worker.backends.training.state import seed_everything
from rollout_worker.backends.training.trainer import Trainer
from training_rig import Rig, make_small, rows_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft asks for it
]

HALF, STEPS = 3, 6
SETTINGS: dict[str, Any] = {
    "minibatch_size": 4, "gradient_accumulation": 2, "budget": {"max_steps": STEPS}, "disable_dropout": False,
    "optimizer": {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 2}, "seed": 7,
}  # fmt: skip
LORA = {"lora": {"r": 4, "alpha": 8, "dropout": 0.1}}
PACKED = {"packing": {"kind": "best_fit", "max_seq_len": 96}}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("small")
    make_small(directory, "0123456789 abcdefghijklmnopqrstuvwxyz,", attention_dropout=0.1)
    return directory


@dataclass
class End:
    """`snapshot` is the id of everything, `weights` the hash of the weights alone."""

    snapshot: str
    weights: str
    metrics: list[dict[str, Any]]


def trained(rig: Rig, trainer: Trainer, first: int, steps: int, name: str) -> End:
    metrics = [{k: v for k, v in line.items() if k != "seconds"} for line in trainer.run(first, steps)]
    captured = trainer.capture({})
    assert captured is not None
    return End(rig.snapshot(trainer, name), captured.digest(), metrics)


def undisturbed(rig: Rig, kind: str, **more: Any) -> End:
    """Leaves its states at steps 0 and HALF in the directories `built` and `half`."""
    trainer = rig.trainer(kind, rows_of(kind), **SETTINGS | more)
    trained(rig, trainer, 0, 0, "built")
    half = trained(rig, trainer, 0, HALF, "half")
    end = trained(rig, trainer, HALF, STEPS - HALF, "end")
    return End(end.snapshot, end.weights, half.metrics + end.metrics)


def resumed(rig: Rig, kind: str, state: str, first: int = HALF, **more: Any) -> End:
    """By a trainer that has seen nothing, in a process whose generators stand elsewhere."""
    trainer = rig.trainer(kind, rows_of(kind), **SETTINGS | more)
    seed_everything(12345, 0)
    trainer.restore(rig.directory / state)
    return trained(rig, trainer, first, STEPS - HALF, f"{state}-end")


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("sft", {}), ("rm", {}), ("dpo", {}), ("ipo", {}), ("kto", {}),
        ("sft", PACKED), ("sft", LORA), ("dpo", LORA), ("rm", LORA),
    ],
    ids=["sft", "rm", "dpo", "ipo", "kto", "sft packed", "sft LoRA", "dpo LoRA", "rm LoRA"],
)  # fmt: skip
def test_it_goes_on_to_the_same_bytes(model: Path, tmp_path: Path, kind: str, more: dict[str, Any]) -> None:
    rig = Rig(model, tmp_path)
    whole = undisturbed(rig, kind, **more)
    rest = resumed(rig, kind, "half", **more)
    assert rest == End(whole.snapshot, whole.weights, whole.metrics[HALF:])
    rates = [line["lr"] for line in whole.metrics]
    assert all(one != other for one, other in pairwise(rates)), "the learning rate changes at every step"


FORGOTTEN = {
    "generators": ("random-00000.safetensors", "random-00000.json"),
    "schedule": ("schedule.json",),
    "optimizer": ("optimizer.safetensors",),
    "weights": ("model.safetensors",),
}
"""Files of a snapshot. In their place come those of a trainer that was only built, as if they were not restored."""


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_whatever_is_not_restored_changes_the_weights(model: Path, tmp_path: Path, kind: str) -> None:
    rig = Rig(model, tmp_path)
    whole = undisturbed(rig, kind)
    ends: dict[str, str] = {}
    for what, names in FORGOTTEN.items():
        shutil.copytree(tmp_path / "half", tmp_path / what)
        for name in names:
            shutil.copy(tmp_path / "built" / name, tmp_path / what / name)
        ends[what] = resumed(rig, kind, what).weights
    for by in (-1, 1):
        directory = shutil.copytree(tmp_path / "half", tmp_path / f"position {by:+}")
        manifest = json.loads((directory / "manifest.json").read_text())
        manifest["position"]["step"] += by
        (directory / "manifest.json").write_text(json.dumps(manifest))
        ends[directory.name] = resumed(rig, kind, directory.name, HALF + by).weights
    assert whole.weights not in ends.values() and len(set(ends.values())) == len(ends), ends
    assert resumed(rig, kind, "half").weights == whole.weights


def test_without_dropout_the_generators_show_nothing(model: Path, tmp_path: Path) -> None:
    """Why the tests above train with it."""
    rig = Rig(model, tmp_path)
    whole = undisturbed(rig, "sft", disable_dropout=True)
    for name in FORGOTTEN["generators"]:
        shutil.copy(tmp_path / "built" / name, tmp_path / "half" / name)
    assert resumed(rig, "sft", "half", disable_dropout=True).weights == whole.weights
