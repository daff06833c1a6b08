"""When each phase of a trial began and ended, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from rollout.workloads.job.results import Durations, Timestamps

TimedPhase = Literal["environment_setup", "agent_setup", "agent_execution", "verifier"]


class Times:
    """The times of a trial. A phase that is entered again, for another step, keeps its first beginning and adds up.
    Waiting for others does not count: the beginning moves by as much."""

    def __init__(self) -> None:
        self._started = datetime.now(UTC)
        self._began = time.monotonic()
        self._moments: dict[str, datetime] = {}
        self._seconds: dict[str, float] = {}
        self._waited = 0.0

    def waited(self, seconds: float) -> None:
        """Record a wait for others in the current phase."""
        self._waited += seconds

    @contextmanager
    def phase(self, name: TimedPhase) -> Generator[None]:
        began, self._waited = time.monotonic(), 0.0
        is_first = f"{name}_started_at" not in self._moments
        self._moments.setdefault(f"{name}_started_at", datetime.now(UTC))
        try:
            yield
        finally:
            self._moments[f"{name}_ended_at"] = datetime.now(UTC)
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began - self._waited
            if is_first:
                self._moments[f"{name}_started_at"] += timedelta(seconds=self._waited)

    def result(self) -> tuple[Durations, Timestamps]:
        """Return the times so far."""
        moments: dict[str, Any] = self._moments
        seconds = {f"{name}_sec": round(seconds, 6) for name, seconds in self._seconds.items()}
        total = round(time.monotonic() - self._began, 6)
        return (
            Durations(total_sec=total, **seconds),
            Timestamps(started_at=self._started, ended_at=datetime.now(UTC), **moments),
        )
