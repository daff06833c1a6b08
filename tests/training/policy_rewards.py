"""Rewards of the tasks in `policy_tasks`, in the shape that TRL has: a list of completions to a list of numbers. It is
imported where rollouts are scored, and needs nothing."""

from __future__ import annotations

from typing import Any


def exact(prompts: list[Any], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return [float(said == right) for said, right in zip(completions, answer, strict=True)]


def digits(prompts: list[Any], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """The share of places at which the right digit stands; what is too long loses as much."""
    return [
        sum(a == b for a, b in zip(said, right, strict=False)) / max(len(said), len(right), 1)
        for said, right in zip(completions, answer, strict=True)
    ]


def nothing(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


class Repair:
    """The environment of two turns. Its reward is `exact` and `digits` of the last one."""

    def reset(self, prompt: str, answer: str, **columns: Any) -> None:
        self.answer, self.turns = answer, 0

    def step(self, completion: str) -> tuple[str, float | None, bool]:
        self.turns += 1
        done = completion == self.answer or self.turns == 2
        given = [""], [completion], [self.answer]
        return "!=", exact(*given)[0] + digits(*given)[0] if done else None, done
