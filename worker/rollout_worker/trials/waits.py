"""Time in which a trial waits for others: it counts in none of its phases, and against none of its deadlines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rollout_worker.trials.times import Times


class Waits:
    """Of one sandbox to be made. `phase`: what goes on before and after, as people are told."""

    def __init__(self, times: Times, progress: Callable[[str], None], phase: str) -> None:
        self.seconds = 0.0
        self.deadline: asyncio.Timeout | None = None
        """It stands still meanwhile."""
        self._times = times
        self._progress = progress
        self._phase = phase

    @contextmanager
    def __call__(self, what: str) -> Generator[None]:
        self._progress(what)
        began = time.monotonic()
        deadline = self.deadline
        ends = None if deadline is None else deadline.when()
        if deadline is not None:
            deadline.reschedule(None)
        try:
            yield
        finally:
            waited = time.monotonic() - began
            self.seconds += waited
            self._times.waited(waited)
            if deadline is not None and ends is not None:
                deadline.reschedule(ends + waited)
            self._progress(self._phase)
