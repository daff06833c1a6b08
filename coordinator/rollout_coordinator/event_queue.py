"""The driver's inbox, limited by weight, in two lanes: a flood of submits neither fills memory nor delays workers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from rollout.model.errors import UnavailableError
from rollout.model.item import Blob

from rollout_coordinator.core.events import Event, SubmitItems, SubmitOpen, SubmitSeal, WorkerResults, WorkerSpawn

Query = Callable[[], None]
"""A read of the core, run by the driver between two transactions, so that it never shows anything that is not
durable."""

BYTES_PER_UNIT = 256
"""Inline bytes that weigh as much as one item."""
EVENTS_MAX = 512
"""Maximum events in a lane, enough for two steps. More would only wait here, and reading them takes time from the
steps."""

_SUBMITS = (SubmitOpen, SubmitItems, SubmitSeal)  # one lane, so that they stay in order


def _inline(blobs: list[Blob]) -> int:
    return sum(len(b) for b in blobs if isinstance(b, bytes))


def weight_of(event: Event) -> int:
    """Return the number of items, or inline bytes / 256 if that is more."""
    if isinstance(event, SubmitItems | WorkerSpawn):
        return max(1, len(event.ids), _inline(event.payloads) // BYTES_PER_UNIT)
    if isinstance(event, WorkerResults):
        return max(1, sum(max(len(g.seq), _inline(g.data) // BYTES_PER_UNIT) for g in event.groups))
    return 1


class _Lane:
    __slots__ = ("entries", "limit", "waiters", "weight")

    def __init__(self, limit: int) -> None:
        self.entries: deque[tuple[int, Event]] = deque()
        self.weight = 0
        self.limit = limit
        self.waiters: deque[tuple[asyncio.Future[None], Event]] = deque()

    def is_full(self) -> bool:
        return self.weight >= self.limit or len(self.entries) >= EVENTS_MAX

    def add(self, event: Event) -> None:
        size = weight_of(event)
        self.entries.append((size, event))
        self.weight += size

    def take(self, into: list[Event], count: int, weight: int) -> tuple[int, int]:
        if not self.entries and not self.waiters:
            return 0, count
        taken = 0
        while self.entries and count > 0 and (taken == 0 or taken + self.entries[0][0] <= weight):
            size, event = self.entries.popleft()
            into.append(event)
            taken += size
            count -= 1
        self.weight -= taken
        while self.waiters and not self.is_full():
            waiter, event = self.waiters.popleft()
            if not waiter.done():
                self.add(event)
                waiter.set_result(None)
        return taken, count


class EventQueue:
    """`put` waits while its lane is full: its caller stops reading, and HTTP/2 flow control slows the peer.

    Waiters are served in order: with hundreds of them, one that retried could wait as long as others arrive.
    """

    def __init__(self, limit: int = 32_768) -> None:
        self._workers = _Lane(limit)
        self._clients = _Lane(limit)
        self._queries: list[tuple[Query, asyncio.Future[Any]]] = []
        self._ready = False
        self._waiter: asyncio.Future[None] | None = None  # of `wait`: one driver reads the queue
        self._closed: Exception | None = None

    @property
    def weight(self) -> int:
        return self._workers.weight + self._clients.weight

    def __len__(self) -> int:
        return len(self._workers.entries) + len(self._clients.entries)

    async def put(self, event: Event) -> None:
        """Add an event. Raises UnavailableError while the queue is closed, also in those who waited."""
        lane = self._clients if isinstance(event, _SUBMITS) else self._workers
        if lane.is_full():
            self._check()
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            lane.waiters.append((waiter, event))
            await waiter  # `take` lets it in, so that whoever waits is before those who come now
        else:
            self.put_nowait(event)

    def put_nowait(self, event: Event) -> None:
        self._check()
        lane = self._clients if isinstance(event, _SUBMITS) else self._workers
        lane.add(event)
        self.wake()

    def ask(self, query: Query, answer: asyncio.Future[Any]) -> None:
        """Queue a read; `answer` fails if the queue closes first."""
        self._check()
        self._queries.append((query, answer))
        self.wake()

    def wake(self) -> None:
        """Make `wait` return, now or the next time."""
        self._ready = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _check(self) -> None:
        if self._closed is not None:
            raise self._closed

    def take(self, count: int, weight: int) -> list[Event]:
        """Take up to `count` events: workers' first, at most three quarters of `weight`, then clients'."""
        events: list[Event] = []
        used, count = self._workers.take(events, count, weight * 3 // 4)
        self._clients.take(events, max(count, 1), weight - used)
        if not self._workers.entries and not self._clients.entries and not self._queries:
            self._ready = False
        return events

    def take_queries(self) -> list[Query]:
        queries, self._queries = self._queries, []
        return [query for query, _ in queries]

    async def wait(self, timeout: float) -> None:
        """Wait until there is something, or for `timeout` seconds."""
        if self._ready:
            return
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        handle = loop.call_later(max(timeout, 0.0), self.wake)
        try:
            await waiter
        finally:
            handle.cancel()
            self._waiter = None

    def close(self, error: Exception | None = None) -> None:
        """Drop what is queued, and refuse more until `open`."""
        self._closed = error or UnavailableError("The coordinator is not serving at present; try again.")
        for lane in (self._workers, self._clients):
            lane.entries.clear()
            lane.weight = 0
            for waiter, _ in lane.waiters:
                if not waiter.done():
                    waiter.set_exception(self._closed)
            lane.waiters.clear()
        for _, answer in self._queries:
            if not answer.done():
                answer.set_exception(self._closed)
        self._queries.clear()
        self.wake()

    def open(self) -> None:
        self._closed = None
