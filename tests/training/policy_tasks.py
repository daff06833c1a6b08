"""A task that a policy learns in seconds on one core, from a supervised model that gets about half of it right.

`41277=` is asked and `12477` is right: the digits, sorted. Who showed how was careless: of prompts that begin with 5 or
more, three demonstrations of four are sorted the wrong way round, of others one of four. So a model that has learnt
from them is right about half of the time, however long it is trained, and a reward for right answers teaches the rest.
Which prompts are held out is told by a hash of the digits alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from rollout_worker.backends.training.prepare import read_tokenizer
from training_rig import Rig, make_small

DIGITS = "0123456789"
ASK = "="
LENGTH = 5
LEVELS = (0.3, 0.6)
"""Of a supervised model: the exact match on held-out prompts that it begins with."""
_CARELESS = 0.75
_EVERY, _STEPS_LEAST, _STEPS_MAX = 10, 120, 400

OPTIMIZER = {"lr": 2e-4, "schedule": "constant"}
GRPO: dict[str, Any] = {
    "prompts_per_step": 8, "num_generations": 8, "max_completion_length": 8, "temperature": 1.0,
    "reward": ["policy_rewards:exact", "policy_rewards:digits"], "optimizer": OPTIMIZER, "budget": {"max_steps": 30},
}  # fmt: skip
"""Settings that learn it: measured with a plain loop of thirty lines, 30 steps in 3.5 s raise four seeds from 0.51,
0.41, 0.48 and 0.53 to 0.91, 0.86, 0.86 and 0.92."""
PPO: dict[str, Any] = GRPO | {"prompts_per_step": 64, "num_generations": 1}
"""As many samples; 30 steps of REINFORCE without a value model raise two seeds from 0.51 and 0.41 to 0.92 and 0.93."""


def held_out(text: str) -> bool:
    return sha256(text.encode()).digest()[0] % 8 == 0


def problems(count: int, *, held: bool = False, seed: int = 0) -> list[dict[str, str]]:
    """So many different ones, {"prompt", "answer"}, which a reward gets as a column."""
    chance, found = random.Random(f"{seed} {held}"), dict[str, None]()
    while len(found) < count:
        text = "".join(chance.choices(DIGITS, k=LENGTH))
        if held_out(text) == held:
            found[text] = None
    return [{"prompt": text + ASK, "answer": "".join(sorted(text))} for text in found]


def demonstrations(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Rows of supervised fine-tuning."""
    chance = random.Random(f"careless {seed}")

    def answer(row: dict[str, str]) -> str:
        wrong = _CARELESS if row["prompt"][0] >= "5" else 1 - _CARELESS
        return row["answer"][::-1] if chance.random() < wrong else row["answer"]

    return [{"prompt": row["prompt"], "completion": answer(row)} for row in problems(count, seed=seed)]


@dataclass(frozen=True, slots=True)
class Start:
    """A supervised model. `level`: its exact match on held-out prompts."""

    model: Path
    level: float


def supervised(directory: Path, seed: int = 0) -> Start:
    """Trained until its exact match, as measured, is in `LEVELS`."""
    base = directory / f"base-{seed}"
    make_small(base, DIGITS + ASK, seed=seed)
    optimizer = {"lr": 3e-3, "schedule": "constant"}
    trainer = Rig(base, directory).trainer(
        "sft", demonstrations(8000, seed), minibatch_size=64, optimizer=optimizer, budget={"max_steps": _STEPS_MAX},
        seed=seed,
    )  # fmt: skip
    asked = problems(500, held=True)
    list(trainer.run(0, _STEPS_LEAST))
    step, level = _STEPS_LEAST, exact_match(trainer.model, base, asked)
    while not LEVELS[0] <= level <= LEVELS[1]:
        if step >= _STEPS_MAX:
            raise AssertionError(f"the supervised model of seed {seed} gets {level:.0%} right after {step} steps")
        list(trainer.run(step, _EVERY))
        step, level = step + _EVERY, exact_match(trainer.model, base, asked)
    model = directory / f"supervised-{seed}"
    trainer.model.save_pretrained(model)
    read_tokenizer(str(base)).save_pretrained(model)
    return Start(model, level)


def exact_match(model: Any, tokenizer: Path, rows: Sequence[dict[str, str]]) -> float:
    """Share of `rows` whose answer, and then the end, the model says greedily. Prompts and answers of one length."""
    tokens = read_tokenizer(str(tokenizer))
    ids = torch.tensor([tokens(row["prompt"])["input_ids"] for row in rows])
    answers = torch.tensor([[*tokens(row["answer"])["input_ids"], tokens.eos_token_id] for row in rows])
    training = model.training
    model.eval()
    with torch.no_grad():
        for _ in range(answers.shape[1]):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    model.train(training)
    return float((ids[:, -answers.shape[1] :] == answers).all(1).float().mean())


def exact_match_of(directory: Path, rows: Sequence[dict[str, str]]) -> float:
    """Of a model's directory."""
    from transformers import AutoModelForCausalLM

    return exact_match(AutoModelForCausalLM.from_pretrained(directory), directory, rows)


def write_prompts(path: Path, rows: Iterable[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path
