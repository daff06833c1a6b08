"""The source of time and identifiers. A simulation has its own."""

from __future__ import annotations

import secrets
import time
from typing import Protocol

from rollout.model.ids import make_ulid

from rollout_coordinator.core.events import Now


class Clock(Protocol):
    def now(self) -> Now:
        """Return monotonic seconds and the wall clock in milliseconds."""
        ...

    def ulid(self) -> str:
        """Return a new identifier."""
        ...


class SystemClock:
    def now(self) -> Now:
        return Now(time.monotonic(), time.time_ns() // 1_000_000)

    def ulid(self) -> str:
        return make_ulid(time.time_ns() // 1_000_000, secrets.token_bytes(10))
