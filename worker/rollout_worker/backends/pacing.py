"""Decides when the next request to a server may start: requests in flight, requests and tokens per minute, pauses."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

SLACK_S = 0.05
"""How far a limit per minute may catch up at once, because timers are late. No other burst is allowed, so the limit
holds over every minute, also across a restart: a new process starts with nothing saved up."""
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.5, 30.0


def backoff_s(tries: int) -> float:
    """Return a pause that grows exponentially with `tries`, from 1 on, with jitter."""
    longest = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(tries - 1, 16))
    return longest * random.uniform(0.5, 1.0)


class _Rate:
    """A limit of units per minute, evenly spaced (the generic cell rate algorithm, ITU-T I.371, with a burst of
    SLACK_S)."""

    def __init__(self, per_minute: int | None) -> None:
        self._unit_s = 60.0 / per_minute if per_minute else 0.0
        self._next = 0.0

    def free_at(self) -> float:
        return self._next

    def take(self, units: float, now: float) -> None:
        """Charge units, also unforeseen ones; a negative number refunds them."""
        self._next = max(self._next, now - SLACK_S) + units * self._unit_s


class Pace:
    """Admits requests in order. The number in flight is halved when the server is overloaded, and grows by a
    thirty-second of `max_in_flight` for each round of answers, at least by one (additive increase, multiplicative
    decrease: Chiu and Jain, 1989)."""

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
        """Current maximum number of requests in flight."""
        return int(self._limit)

    async def enter(self, tokens: float) -> float:
        """Wait until a request of about `tokens` may start, and return when it did. `leave` ends it."""
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
        """Correct the estimate by the tokens that the request used."""
        self._tokens.take(tokens - estimated, self._clock())

    def answered(self) -> None:
        self._limit = min(float(self._most), self._limit + max(1.0, self._most / 32) / self._limit)

    def overloaded(self, began: float) -> None:
        """Note that the server refused a request started at `began`. Requests in flight together count once."""
        if began > self._cut_at:
            self._cut_at = self._clock()
            self._limit = max(1.0, self._limit / 2)

    def hold(self, on: bool) -> None:
        """Hold back new requests, or release them; requests in flight continue."""
        self._held = on
        self._moved.set()

    def pause(self, seconds: float) -> None:
        """Start no request for this time."""
        self._paused_until = max(self._paused_until, self._clock() + seconds)
