"""A process of training and what it is told, over a trainer that only counts."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from rollout_worker.backends.training.rank import Rank

pytestmark = pytest.mark.engine

LOSSES = {10: 2.0, 20: 2.5, 30: 1.5, 40: 1.75, 50: 1.45, 60: 1.0}
"""Of evaluations, by step: with a patience of two and a `min_delta` of 0.1 the fifth is the last."""


class Counting:
    """In the place of a `Trainer`."""

    def __init__(self) -> None:
        rule = SimpleNamespace(every_steps=10, patience=2, min_delta=0.1)
        self.settings, self.plan = SimpleNamespace(eval=rule), SimpleNamespace(steps=1000)
        self.job, self.speed, self.step = SimpleNamespace(eval_data="held out"), {}, 0

    def begin(self, directory: Any, versions: Any) -> None: ...

    def told(self) -> dict[str, Any]:
        return {}

    def run(self, first: int, steps: int) -> Iterator[dict[str, Any]]:
        for step in range(first, first + steps):
            self.step = step + 1
            yield {"step": self.step}

    def evaluate(self) -> dict[str, float]:
        return {"loss": LOSSES[self.step]}

    def capture(self, manifest: dict[str, Any]) -> None:
        """As where another rank has the state."""


def segments(*stretches: tuple[int, int]) -> list[dict[str, Any]]:
    """What is answered; each of (first step, steps) begins with what the one before came to."""
    rank: Any = Rank.__new__(Rank)  # without a socket
    rank._trainer, rank._writing = Counting(), None
    found: list[dict[str, Any]] = []
    rank._say = lambda **answer: found.append(answer)
    stopping: dict[str, Any] = {}
    for first, steps in stretches:
        rank._run({"first": first, "steps": steps, "stopping": stopping, "manifest": {}})
        stopping = next((answer["stopping"] for answer in reversed(found) if "stopping" in answer), {})
    return found


def test_it_stops_at_the_evaluation_that_ends_the_run() -> None:
    said = segments((0, 1000))
    assert [answer["step"]["step"] for answer in said if "step" in answer] == list(range(1, 51))
    assert [answer["ends"] for answer in said if "ends" in answer] == [False, False, False, False, True]
    assert said[-1]["staged"] == {"step": 50}, "the state is that of this step"


def test_it_stops_at_the_same_one_wherever_it_begins() -> None:
    whole, parts = segments((0, 1000)), segments((0, 20), (20, 25), (45, 20))
    told = [[answer for answer in said if "step" in answer or "evaluation" in answer] for said in (whole, parts)]
    assert told[0] == told[1] and parts[-1]["staged"] == {"step": 50}
