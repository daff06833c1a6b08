"""Every algorithm learns what it is for: tiny models from random weights, fixed seeds, rows that were held out.

ROLLOUT_CURVES_DIR=DIR leaves the curves of each in DIR/NAME/curves.png, as `rollout train` draws them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout.workloads.json_form import dump_line
from rollout.workloads.train.model_output import draw_curves
from rollout_worker.backends.training.prepare import read_tokenizer
from rollout_worker.backends.training.trainer import Trainer
from training_rig import Rig, make_small

pytestmark = pytest.mark.engine

DIGITS = "0123456789"
Metrics = list[dict[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("small")
    make_small(directory, DIGITS + "+=")
    return directory


@pytest.fixture
def rig(model: Path, tmp_path: Path) -> Rig:
    return Rig(model, tmp_path)


def learn(trainer: Trainer, name: str) -> Metrics:
    found = list(trainer.run(0, trainer.plan.steps))
    if given := os.environ.get("ROLLOUT_CURVES_DIR"):
        directory = Path(given) / name
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "metrics.jsonl").write_bytes(b"".join(dump_line(line) for line in found))
        draw_curves(directory)
    return found


def adam(lr: float, **more: Any) -> dict[str, Any]:
    return {"lr": lr, "schedule": "cosine", "warmup_steps": 10} | more


def shuffled(values: Iterable[Any], seed: int = 0) -> list[Any]:
    found = list(values)
    random.Random(seed).shuffle(found)
    return found


def exact_match(trainer: Trainer, model: Path, rows: list[dict[str, str]]) -> float:
    """Share of `rows` whose whole completion the model says, greedily. Prompts and completions are of one length."""
    tokenizer = read_tokenizer(str(model))
    ids = torch.tensor([tokenizer(row["prompt"])["input_ids"] for row in rows])
    length = ids.shape[1]
    trainer.model.eval()
    with torch.no_grad():
        for _ in rows[0]["completion"]:
            logits = trainer.model(input_ids=ids).logits[:, -1]
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    said = [tokenizer.decode(row) for row in ids[:, length:].tolist()]
    return sum(one == row["completion"] for one, row in zip(said, rows, strict=True)) / len(rows)


def reversal(number: int) -> dict[str, str]:
    return {"prompt": f"{number:04}=", "completion": f"{number:04}"[::-1]}


def test_sft_reverses_numbers_that_it_never_saw(rig: Rig) -> None:
    numbers = shuffled(range(10_000))
    held, trained = [reversal(n) for n in numbers[:500]], [reversal(n) for n in numbers[500:]]
    trainer = rig.trainer(
        "sft", trained, minibatch_size=64, optimizer=adam(3e-3), budget={"max_steps": 150}, seed=1
    )  # fmt: skip
    before = exact_match(trainer, rig.model, held)
    found = learn(trainer, "sft")
    assert before < 0.05 < 0.95 <= exact_match(trainer, rig.model, held)
    assert found[-1]["loss"] < 0.1 * found[0]["loss"]


def pairs(count: int) -> list[dict[str, str]]:
    """Better are even digits, worse are odd ones: four, and the end."""
    luck = random.Random(2)

    def some(digits: str) -> str:
        return "".join(luck.choices(digits, k=4))

    return [{"prompt": f"{some(DIGITS)}=", "chosen": some("02468"), "rejected": some("13579")} for _ in range(count)]


def test_dpo_raises_the_margin_of_pairs(rig: Rig) -> None:
    rows = pairs(1000)
    settings = {"minibatch_size": 32, "optimizer": adam(2e-3), "budget": {"max_steps": 40}, "seed": 1}
    found = learn(rig.trainer("dpo", rows, **settings), "dpo")
    assert found[0]["rewards/margins"] == 0.0, "the policy is its own reference"
    assert found[-1]["rewards/margins"] > 1.0 and found[-1]["rewards/accuracies"] > 0.95
    assert found[-1]["loss"] < 0.5 * found[0]["loss"]


def test_a_reward_model_ranks_pairs_that_it_never_saw(rig: Rig) -> None:
    """Better is the completion with more nines."""
    luck = random.Random(3)

    def digits(nines: int) -> str:
        return "".join(luck.sample("9" * nines + "".join(luck.choices("012345678", k=6 - nines)), 6))

    def pair() -> dict[str, str]:
        worse, better = sorted(luck.sample(range(6), 2))
        return {"prompt": "".join(luck.choices(DIGITS, k=2)) + "=", "chosen": digits(better), "rejected": digits(worse)}

    rows = [pair() for _ in range(2500)]
    settings = {"minibatch_size": 32, "optimizer": adam(2e-3), "budget": {"max_steps": 60}, "seed": 1}
    trainer = rig.trainer("rm", rows[500:], **settings)
    learn(trainer, "rm")
    (rig.directory / "held").mkdir()
    held = Rig(rig.model, rig.directory / "held").trainer("rm", rows[:500], **settings)
    trainer.collator = held.collator
    trainer.model.eval()
    with torch.no_grad():
        found = trainer.algorithm.loss(trainer.models, trainer.collator.batch(range(500)))
    right, count = found.metrics["accuracy"]
    assert count == 500 and float(right / count) >= 0.95


def test_kto_raises_what_is_desirable_and_lowers_what_is_not(rig: Rig) -> None:
    rows = [
        {"prompt": row["prompt"], "completion": row[which], "label": which == "chosen"}
        for row in pairs(500)
        for which in ("chosen", "rejected")
    ]
    settings = {"minibatch_size": 32, "optimizer": adam(2e-3), "budget": {"max_steps": 40}, "seed": 1}
    found = learn(rig.trainer("kto", rows, **settings), "kto")
    assert found[0]["rewards/chosen"] == found[0]["rewards/rejected"] == 0.0
    assert found[-1]["rewards/chosen"] > 0.2 and found[-1]["rewards/rejected"] < -0.2
    assert found[-1]["logps/chosen"] > found[0]["logps/chosen"]
    assert found[-1]["logps/rejected"] < found[0]["logps/rejected"]


def test_the_margin_of_ipo_ends_at_what_beta_says_and_not_beyond(rig: Rig) -> None:
    """1 / (2 beta) of the mean over a completion's tokens, which are four and the end: DPO's margin has no end."""
    beta, tokens = 0.5, 5
    rows = pairs(1000)
    settings = {"minibatch_size": 32, "optimizer": adam(2e-3), "budget": {"max_steps": 60}, "seed": 1, "beta": beta}
    found = learn(rig.trainer("ipo", rows, **settings), "ipo")
    margins = [line["rewards/margins"] / beta / tokens for line in found]
    assert margins[0] == 0.0
    assert sum(margins[-20:]) / 20 == pytest.approx(1 / (2 * beta), rel=0.05)
    assert found[-1]["loss"] < 0.1 < 1.0 == pytest.approx(found[0]["loss"])
