"""A task that a policy learns in seconds on one core, from a supervised model that gets about half of it right.

`41277=` is asked and `12477` is right: the digits, sorted. Who showed how was careless: of prompts that begin with 5 or
more, three demonstrations of four are sorted the wrong way round, of others one of four. So a model that has learnt
from them is right about half of the time, however long it is trained, and a reward for right answers teaches the rest.
Which prompts are held out is told by a hash of the digits alone.

A task of two turns: digits are wanted upwards or downwards, and nothing in the prompt says which. So half of all first
answers are wrong, whoever gives them; the environment says so, and the other way is right then. Whoever showed how began
with upwards, and two times of three said the same again. Each turn ends with a full stop.
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
END, WRONG = ".", "!="
"""Of the task of two turns: what ends a turn, and what the environment says."""
LENGTH = 5
LEVELS = (0.3, 0.6)
"""Of a supervised model: the exact match on held-out prompts that it begins with."""
_CARELESS = 0.75
_EVERY, _STEPS_LEAST, _STEPS_LEAST_TURNS, _STEPS_MAX = 10, 120, 200, 400

OPTIMIZER = {"lr": 2e-4, "schedule": "constant"}
GRPO: dict[str, Any] = {
    "prompts_per_step": 8, "num_generations": 8, "max_completion_length": 8, "temperature": 1.0,
    "reward": ["policy_rewards:exact", "policy_rewards:digits"], "optimizer": OPTIMIZER, "budget": {"max_steps": 20},
}  # fmt: skip
"""Settings that learn it, of PPO too."""
TURNS: dict[str, Any] = GRPO | {
    "reward": [], "environment": {"kind": "multi_turn", "class": "policy_rewards:Repair", "max_turns": 2},
    "max_completion_length": 16, "stop_token_ids": [13], "optimizer": OPTIMIZER | {"lr": 3e-4},
    "budget": {"max_steps": 30},
}  # fmt: skip


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


def turn_problems(count: int, *, held: bool = False, seed: int = 0) -> list[dict[str, str]]:
    """Of the task of two turns. `answer`: sorted as it is wanted."""
    chance = random.Random(f"way {seed} {held}")
    rows = problems(count, held=held, seed=seed)
    return [row | {"answer": chance.choice((row["answer"], row["answer"][::-1])) + END} for row in rows]


def turn_demonstrations(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Of first turns and of second ones."""
    chance, rows = random.Random(f"careless turns {seed}"), list[dict[str, str]]()
    for row in problems(count // 2, seed=seed):
        said = row["answer"]
        again = said if chance.random() < 2 / 3 else said[::-1]
        rows.append({"prompt": row["prompt"], "completion": said + END})
        rows.append({"prompt": row["prompt"] + said + END + WRONG, "completion": again + END})
    return rows


@dataclass(frozen=True, slots=True)
class Start:
    """A supervised model. `level`: its exact match on held-out prompts."""

    model: Path
    level: float


def supervised(directory: Path, seed: int = 0, *, turns: bool = False) -> Start:
    """Trained until its exact match, as measured, is in `LEVELS`."""
    base = directory / f"base-{seed}"
    make_small(base, DIGITS + ASK + (END + WRONG[0] if turns else ""), seed=seed)
    optimizer = {"lr": 3e-3, "schedule": "constant"}
    rows = turn_demonstrations(16000, seed) if turns else demonstrations(8000, seed)
    trainer = Rig(base, directory).trainer(
        "sft", rows, minibatch_size=64, optimizer=optimizer, budget={"max_steps": _STEPS_MAX}, seed=seed
    )
    measure, asked = (turns_match, turn_problems) if turns else (exact_match, problems)
    held = asked(500, held=True)
    step = _STEPS_LEAST_TURNS if turns else _STEPS_LEAST
    list(trainer.run(0, step))
    level = measure(trainer.model, base, held)
    while not LEVELS[0] <= level <= LEVELS[1]:
        if step >= _STEPS_MAX:
            raise AssertionError(f"the supervised model of seed {seed} gets {level:.0%} right after {step} steps")
        list(trainer.run(step, _EVERY))
        step, level = step + _EVERY, measure(trainer.model, base, held)
    model = directory / f"supervised-{seed}"
    trainer.model.save_pretrained(model)
    read_tokenizer(str(base)).save_pretrained(model)
    return Start(model, level)


def exact_match(model: Any, tokenizer: Path, rows: Sequence[dict[str, str]]) -> float:
    """Share of `rows` whose answer, and then the end, the model says greedily. Prompts and answers of one length."""
    tokens = read_tokenizer(str(tokenizer))
    ids = torch.tensor([tokens(row["prompt"])["input_ids"] for row in rows])
    answers = torch.tensor([[*tokens(row["answer"])["input_ids"], tokens.eos_token_id] for row in rows])
    return float(_says(model, ids, answers)[1].float().mean())


def turns_match(model: Any, tokenizer: Path, rows: Sequence[dict[str, str]]) -> float:
    """Share of `rows` whose answer the model says greedily in its first turn, or in its second one."""
    tokens = read_tokenizer(str(tokenizer))
    ids = torch.tensor([tokens(row["prompt"])["input_ids"] for row in rows])
    answers = torch.tensor([tokens(row["answer"])["input_ids"] for row in rows])
    said, first = _says(model, ids, answers)
    wrong = torch.tensor(tokens(WRONG)["input_ids"]).expand(len(rows), -1)
    _, second = _says(model, torch.cat([said, wrong], 1), answers)
    return float((first | second).float().mean())


def _says(model: Any, ids: torch.Tensor, answers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(`ids` and as many tokens as an answer has, by row whether they are the answer)."""
    training = model.training
    model.eval()
    with torch.no_grad():
        for _ in range(answers.shape[1]):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    model.train(training)
    return ids, (ids[:, -answers.shape[1] :] == answers).all(1)


def exact_match_of(directory: Path, rows: Sequence[dict[str, str]]) -> float:
    """Of a model's directory."""
    from transformers import AutoModelForCausalLM

    return exact_match(AutoModelForCausalLM.from_pretrained(directory), directory, rows)


def write_prompts(path: Path, rows: Iterable[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path
