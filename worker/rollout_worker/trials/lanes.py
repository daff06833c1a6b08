"""Remembers which services asked to slow down: other trials that use the same service wait before their agent
starts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

FIRST_S, MOST_S = 5.0, 300.0
"""The wait if a service names none: it doubles after each refusal, until a trial succeeds."""
ASKED_MOST_S = 3600.0


class Lanes:
    """The lanes of a process. A lane is a group of agents with one provider."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}
        self._next: dict[str, float] = {}

    def refused(self, lane: str, retry_after_s: float | None) -> float:
        """Return for how many seconds no agent of the lane starts."""
        if retry_after_s is None:
            wait = self._next.get(lane, FIRST_S)
            self._next[lane] = min(MOST_S, 2 * wait)
        else:
            wait = min(max(0.0, retry_after_s), ASKED_MOST_S)
        self._until[lane] = max(self._until.get(lane, 0.0), self._clock() + wait)
        return wait

    def passed(self, lane: str) -> None:
        self._next.pop(lane, None)

    def left(self, lane: str) -> float:
        """Return the remaining wait in seconds."""
        return max(0.0, self._until.get(lane, 0.0) - self._clock())

    async def wait(self, lane: str) -> None:
        while (left := self.left(lane)) > 0:  # noqa: ASYNC110 - for a time, which may have grown meanwhile
            await asyncio.sleep(left)
