"""An environment: guess a number. The host makes one object for each episode."""

from __future__ import annotations

import random
from typing import Any


class Guess:
    def __init__(self) -> None:
        self._secret = 0
        self._left = 0

    async def reset(self, task: dict[str, Any], *, seed: int, episode_id: str) -> dict[str, str]:
        highest = int(task["highest"])
        self._secret = random.Random(seed).randint(1, highest)  # equal seeds give equal episodes
        self._left = int(task.get("tries", 10))
        return {"say": f"guess a number from 1 to {highest}"}

    async def step(self, action: int, *, timeout_s: float) -> dict[str, Any]:
        self._left -= 1
        if action == self._secret:
            return {"observation": {"say": "correct"}, "reward": 1.0, "done": True}
        hint = "higher" if action < self._secret else "lower"
        return {"observation": {"say": hint}, "reward": 0.0, "done": self._left <= 0}

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


def create() -> Guess:
    return Guess()
