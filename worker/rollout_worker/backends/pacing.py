"""When the next request to a server may begin: requests in flight, requests and tokens a minute, pauses."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

SLACK_S = 0.05
"""What a limit a minute lets catch up with at once: timers are late by some of it. There is no other burst, so the
limit holds over every minute, also across a restart: a new process begins with nothing saved up."""
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.5, 30.0


def backoff_s(tries: int) -> float:
    """Exponential in `tries`, from 1 on, with jitter."""
    longest = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(tries - 1, 16))
    return longest * random.uniform(0.5, 1.0)


class _Rate:
    """So many units a minute, spaced evenly (the generic cell rate algorithm, ITU-T I.371, with a burst of SLACK_S)."""

    def __init__(self, per_minute: int | None) -> None:
        self._unit_s = 60.0 / per_minute if per_minute else 0.0
        self._next = 0.0

    def free_at(self) -> float:
        return self._next

    def take(self, units: float, now: float) -> None:
        """Also of units that were not foreseen; a negative number gives back."""
        self._next = max(self._next, now - SLACK_S) + units * self._unit_s


class Pace:
    """First come, first served. Requests in flight are halved when the server is overloaded and grow by a thirty-second
    of `max_in_flight` for each round of answers, at least by one (additive increase, multiplicative decrease: Chiu and
    Jain, 1989)."""

    def __init__(
        self,
        max_in_flight: int,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = max_in_flight
        self._limit = float(max_in_flight)
        self._requests = _Rate(requests_per_minute)
        self._tokens = _Rate(tokens_per_minute)
        self._clock = clock
        self._in_flight = 0
        self._cut_at = float("-inf")
        self._paused_until = float("-inf")
        self._turn = asyncio.Lock()  # wakes its waiters in their order
        self._moved = asyncio.Event()
        self._held = False

    @property
    def limit(self) -> int:
        """Requests that may be in flight now."""
        return int(self._limit)

    async def enter(self, tokens: float) -> float:
        """Wait until a request of about so many tokens may begin. When it did; `leave` ends it."""
        async with self._turn:
            while True:
                now = self._clock()
                at = max(self._paused_until, self._requests.free_at(), self._tokens.free_at())
                if at > now:
                    await asyncio.sleep(at - now)
                elif self._held or self._in_flight >= self.limit:
                    self._moved.clear()
                    await self._moved.wait()
                else:
                    break
            self._in_flight += 1
            self._requests.take(1, now)
            self._tokens.take(tokens, now)
            return now

    def leave(self) -> None:
        self._in_flight -= 1
        self._moved.set()

    def used(self, estimated: float, tokens: float) -> None:
        """The request took so many tokens, not those that were estimated."""
        self._tokens.take(tokens - estimated, self._clock())

    def answered(self) -> None:
        self._limit = min(float(self._most), self._limit + max(1.0, self._most / 32) / self._limit)

    def overloaded(self, began: float) -> None:
        """The server refused a request that began then. Those that were in flight together say it together."""
        if began > self._cut_at:
            self._cut_at = self._clock()
            self._limit = max(1.0, self._limit / 2)

    def hold(self, on: bool) -> None:
        """Nothing begins until it is taken back; what is in flight goes on."""
        self._held = on
        self._moved.set()

    def pause(self, seconds: float) -> None:
        """No request begins for so long."""
        self._paused_until = max(self._paused_until, self._clock() + seconds)
