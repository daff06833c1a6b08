"""Time that a trial waits for others: it counts neither in its phases nor against its deadlines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rollout_worker.trials.times import Times


class Waits:
    """The waits for one sandbox. `phase` is the one shown to users before and after."""

    def __init__(self, times: Times, progress: Callable[[str], None], phase: str) -> None:
        self.seconds = 0.0
        self.deadline: asyncio.Timeout | None = None
        """Suspended meanwhile."""
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
