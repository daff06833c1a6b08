"""Keeps the leases of all held messages from receipt on: one task, in batches.

A lease is extended when half of it is left, or earlier if extending took long. While the service is unreachable the
call is retried until the lease has expired. A lost lease is reported with its reason and no longer extended.

    keeper = Keeper(queue, lease_s=300.0, on_lost=note)
    task = asyncio.create_task(keeper.run())
    keeper.hold(await queue.dequeue(100, 300.0, 20.0))  # at once: a lease runs from receipt on
    ...
    keeper.release(done)  # before they are acknowledged or given back
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from rollout.model.errors import RolloutError
from rollout.queues.port import Message, Queue, may_pass

Loss = Literal["taken", "outage", "limit"]
"""Reason of a loss. taken: the service says that the lease is no longer ours. outage: it could not be extended in time.
limit: the service lets nobody hold a message for longer than `Facts.max_held_s`."""

_CHUNK = 1000
_LOOKS = 8
"""Number of checks in the time of one lease."""
_LIMIT_MARGIN_S = 60.0
"""Seconds before `max_held_s` at which extensions end, because the service's clock started before ours."""


@dataclass(slots=True)
class _Held:
    message: Message
    until_s: float
    limit_s: float


class Keeper:
    """Keeper of leases. `on_lost` is called in the event loop. `now` returns monotonic seconds."""

    def __init__(
        self,
        queue: Queue,
        lease_s: float,
        on_lost: Callable[[list[Message], Loss], None],
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._lease_s = min(lease_s, queue.facts.max_lease_s)
        self._on_lost = on_lost
        self._now = now
        self._held: dict[str, _Held] = {}
        self._took_s = 0.0
        self._some = asyncio.Event()

    @property
    def held(self) -> int:
        return len(self._held)

    def hold(self, messages: Iterable[Message], lease_s: float | None = None) -> None:
        """Hold messages that were received just now. `lease_s` is the lease they were received with, if it differs."""
        now, facts = self._now(), self._queue.facts
        limit = now + max(0.0, facts.max_held_s - min(_LIMIT_MARGIN_S, facts.max_held_s / 10))
        for message in messages:
            self._held[message.receipt] = _Held(message, now + (lease_s or self._lease_s), limit)
        if self._held:
            self._some.set()

    def release(self, messages: Iterable[Message]) -> None:
        """Stop extending the leases; messages that are not held are ignored."""
        for message in messages:
            self._held.pop(message.receipt, None)

    async def run(self) -> None:
        """Extend leases until cancelled. Raises ConfigError if that is not permitted."""
        while True:
            if not self._held:
                self._some.clear()
                await self._some.wait()
            await self.look()
            await asyncio.sleep(self._lease_s / _LOOKS)

    async def look(self) -> None:
        """Extend what is due, and report what was lost."""
        self._drop_the_late()
        due = self._due()
        for start in range(0, len(due), _CHUNK):
            await self._extend([held for held in due[start : start + _CHUNK] if self._holds(held)])
        self._drop_the_late()

    def _due(self) -> list[_Held]:
        """Return the leases to extend now: the next check comes an eighth of a lease later, and extending takes time
        too."""
        lead = min(0.9 * self._lease_s, self._lease_s * (0.5 + 1 / _LOOKS) + self._took_s)
        now = self._now()
        due = [held for held in self._held.values() if held.until_s - now <= lead and held.until_s + 1 < held.limit_s]
        return sorted(due, key=lambda held: held.until_s)

    async def _extend(self, due: list[_Held]) -> None:
        """Extend in groups of equal lease; near the limit the lease is what is left, and it is the last."""
        now = self._now()
        groups: dict[float, list[_Held]] = {}
        for held in due:
            left_s = held.limit_s - now
            groups.setdefault(self._lease_s if left_s >= self._lease_s else float(int(left_s)), []).append(held)
        for lease_s, group in groups.items():
            if lease_s > 0:
                await self._extend_by(lease_s, group)

    async def _extend_by(self, lease_s: float, due: list[_Held]) -> None:
        started = self._now()
        try:
            lost = {message.receipt for message in await self._queue.extend([held.message for held in due], lease_s)}
        except RolloutError as error:
            if not may_pass(error):
                raise
            return  # the next look tries again, until their time is over
        finally:
            self._took_s = self._now() - started
        taken: list[Message] = []
        for held in due:
            if not self._holds(held):
                continue  # released meanwhile
            if held.message.receipt in lost:
                del self._held[held.message.receipt]
                taken.append(held.message)
            else:
                held.until_s = started + lease_s
                if lease_s < self._lease_s:
                    held.limit_s = held.until_s
        if taken:
            self._on_lost(taken, "taken")

    def _drop_the_late(self) -> None:
        now = self._now()
        late = [held for held in self._held.values() if held.until_s <= now]
        for held in late:
            del self._held[held.message.receipt]
        for why in ("limit", "outage"):
            lost = [held.message for held in late if (held.until_s + 1 >= held.limit_s) == (why == "limit")]
            if lost:
                self._on_lost(lost, why)

    def _holds(self, held: _Held) -> bool:
        return self._held.get(held.message.receipt) is held
