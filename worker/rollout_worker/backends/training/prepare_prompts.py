"""Turns rows of files into prompts: the first item of a run of reinforcement learning does this, and its dry run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollout.model.errors import AttemptError
from rollout.workloads.train.encode import Encoded
from rollout.workloads.train.policy_config import PolicySection
from rollout.workloads.train.prompts import Prompt
from rollout.workloads.train.report import Place, Report
from rollout.workloads.train.rows import PromptRow, Row


def room_for_prompts(settings: PolicySection, positions: int | None) -> int:
    """Return the maximum tokens of a prompt: what completions leave of `max_length`, and of the model's positions.
    Raises AttemptError if nothing is left."""
    room = min(settings.max_length, positions or settings.max_length) - settings.max_completion_length
    if room < 1:
        raise AttemptError(
            f"max_completion_length = {settings.max_completion_length:,} leaves no token for a prompt: the model has "
            f"{positions:,} positions (max_position_embeddings): lower it",
            code="invalid_data",
            retry=False,
        )
    return room


def collect(rows: Iterable[tuple[Place, Row, Encoded]], report: Report) -> list[Prompt]:
    """Return the prompts of the rows that `report` keeps. A column that only some rows have is null in the others."""
    prompts: list[Prompt] = []
    names: dict[str, None] = {}
    for place, row, encoded in rows:
        assert isinstance(row, PromptRow)
        if report.count(place, encoded):
            names.update(dict.fromkeys(row.columns))
            prompts.append(Prompt(place.number, encoded.sequences[0].ids, row.prompt, row.columns))
    for prompt in prompts:
        for name in names:
            prompt.columns.setdefault(name, None)
    report.units = len(prompts)
    return prompts


def check_reward_tokenizer(tokenizer: Any, other: Any, name: str) -> None:
    """Raise AttemptError unless both produce the same tokens: a reward model is given those that the policy
    generated."""
    same = tokenizer.get_vocab() == other.get_vocab()
    if not same or (tokenizer.eos_token_id, tokenizer.bos_token_id) != (other.eos_token_id, other.bos_token_id):
        raise AttemptError(
            f"reward: {name} has another tokenizer than base_model, whose tokens it would not understand: name a "
            "reward model that was trained from the same base",
            code="invalid_data",
            retry=False,
        )
