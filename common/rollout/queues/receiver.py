"""Receive calls of a queue service, several in flight while messages come.

A call is never aborted while the queue is open, because the service may already have leased messages that nobody would
know of. What such a call returns goes to the next caller, or back to the queue.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from rollout.model.errors import RolloutError
from rollout.queues.port import Message

log = structlog.get_logger()

SHORTEST_WAIT_S = 1.0
"""Minimum seconds to wait for a call in flight, even if the caller does not want to wait."""


@dataclass(frozen=True, slots=True)
class Call:
    """Request of one call. `calls` is the number in flight, including it. `wait_s` is how long to wait for a message;
    with `at_once` the service must answer without waiting."""

    size: int
    lease_s: float
    wait_s: float
    calls: int
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class Arrived:
    """Received messages. `at` is in monotonic seconds; `lease_s` is the lease that was requested."""

    message: Message
    at: float
    lease_s: float


class Receiver:
    """Receiver of messages.

    `batch` is the maximum of one call. `enough` is the share of the requested number that suggests more to come, so
    that another call is added. `give_back` takes what arrives after the last caller has gone.
    """

    def __init__(
        self,
        receive: Callable[[Call], Awaitable[list[Message]]],
        give_back: Callable[[list[Message]], Awaitable[object]],
        *,
        batch: int,
        most_calls: int,
        enough: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._receive = receive
        self._give_back = give_back
        self._batch = batch
        self._most_calls = most_calls
        self._enough = enough
        self._now = now
        self._calls: dict[asyncio.Task[list[Message]], Call] = {}
        self._wanted = 1
        self._arrived: list[Arrived] = []
        self._asked = 0
        self._giving_back: set[asyncio.Task[None]] = set()

    async def take(self, limit: int, lease_s: float, wait_s: float) -> list[Arrived]:
        """Return at most `limit` messages. Errors of a call are raised once nothing is left to hand out."""
        self._asked += 1
        now = self._now()
        until, latest = now + wait_s, now + max(wait_s, SHORTEST_WAIT_S)
        ended = False
        while limit > 0:
            ended |= self._harvest()
            if self._arrived:
                taken, self._arrived = self._arrived[:limit], self._arrived[limit:]
                return taken
            now = self._now()
            if now >= latest or (ended and now >= until):
                break
            self._start(limit, lease_s, max(0.0, until - now))
            try:
                await asyncio.wait(self._calls, timeout=latest - now, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                self._leave()
                raise
        return []

    async def look(self, lease_s: float) -> bool:
        """Return whether there is no message, by one more call that is answered. The next caller gets what it returns.

        Raises the errors of the call.
        """
        call = Call(self._batch, lease_s, 0.0, len(self._calls) + 1, at_once=True)
        task = asyncio.ensure_future(self._receive(call))
        self._calls[task] = call
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            self._leave()
            raise
        self._harvest()
        return not self._arrived

    def put_back(self, arrived: list[Arrived]) -> None:
        """Put back what was taken but not handed out."""
        self._arrived = arrived + self._arrived

    async def end(self) -> list[Message]:
        """Abort what is in flight, and return what has arrived but was not handed out."""
        for task in (*self._calls, *self._giving_back):
            task.cancel()
        await asyncio.gather(*self._giving_back, return_exceptions=True)
        ended = await asyncio.gather(*self._calls, return_exceptions=True)
        late = [message for got in ended if not isinstance(got, BaseException) for message in got]
        left = [arrived.message for arrived in self._arrived] + late
        self._calls.clear()
        self._arrived.clear()
        return left

    def _start(self, limit: int, lease_s: float, wait_s: float) -> None:
        room = limit - sum(call.size for call in self._calls.values())
        while len(self._calls) < self._wanted and room > 0:
            size = min(self._batch, room)
            call = Call(size, lease_s, wait_s, len(self._calls) + 1)
            self._calls[asyncio.ensure_future(self._receive(call))] = call
            room -= size

    def _harvest(self) -> bool:
        """Collect the results of ended calls; return whether any had ended."""
        done = [task for task in self._calls if task.done()]
        failed: list[asyncio.Task[list[Message]]] = []
        for task in done:
            if task.cancelled() or task.exception() is not None:
                failed.append(task)
                continue
            call, got = self._calls.pop(task), task.result()
            self._arrived += [Arrived(message, self._now(), call.lease_s) for message in got]
            if not got:
                self._wanted = 1
            elif len(got) >= self._enough * call.size:
                self._wanted = min(2 * self._wanted, self._most_calls)
            else:
                self._wanted = max(1, self._wanted // 2)
        if failed and not self._arrived:
            for task in failed:
                del self._calls[task]
            self._wanted = 1
            failed[0].result()
        return bool(done)

    def _leave(self) -> None:
        if self._calls:
            task = asyncio.ensure_future(self._give_back_unless_asked(self._asked))
            self._giving_back.add(task)
            task.add_done_callback(self._giving_back.discard)

    async def _give_back_unless_asked(self, asked: int) -> None:
        await asyncio.wait(self._calls)
        if asked != self._asked:
            return
        try:
            self._harvest()
            left, self._arrived = self._arrived, []
            if left:
                await self._give_back([arrived.message for arrived in left])
        except RolloutError as e:
            log.warning("queue_not_given_back", error=str(e))
