"""Base of the cloud providers' queues: receives, keeps the order of a group, and closes."""

from __future__ import annotations

import math
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import structlog

from rollout.model.errors import InputError, RolloutError, StateError
from rollout.queues.batches import cut, each
from rollout.queues.port import Facts, Message, Outgoing, Place
from rollout.queues.receiver import Arrived, Call, Receiver

log = structlog.get_logger()

OPEN_BUDGET_S = LOOK_BUDGET_S = 15.0
_LANES = 8


class _Client(Protocol):
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One message of a batch, with the fields of the service's call."""

    index: int
    fields: dict[str, Any]
    size: int = 0


class CloudQueue(ABC):
    """Queue of a provider. It closes `client`. `receive_batch`, `most_calls` and `enough` are those of `Receiver`."""

    send_batch: ClassVar[int]
    receive_batch: ClassVar[int]
    most_calls: ClassVar[int]
    enough: ClassVar[float]

    def __init__(self, place: Place, client: _Client, *, now: Callable[[], float] = time.monotonic) -> None:
        self._address = place.address
        self._client = client
        self._now = now
        self._facts: Facts | None = None
        self._own_lease_s: float | None = None  # that the service gives, whatever was asked for
        self._receiver = Receiver(
            self._receive, self.nack, batch=self.receive_batch, most_calls=self.most_calls, enough=self.enough, now=now
        )
        self._closed = False

    @abstractmethod
    def _entry(self, index: int, message: Outgoing) -> Entry:
        """Encode a message. Raises InputError with `index` if the queue does not accept it."""

    @abstractmethod
    def _order(self, message: Outgoing) -> str | None:
        """Return the key of messages whose batches are sent one after the other, or None for any order."""

    @abstractmethod
    async def _send(self, batch: list[Entry]) -> dict[int, str]:
        """Send a batch and return the id of each message by its index."""

    @abstractmethod
    async def _receive(self, call: Call) -> list[Message]: ...

    @abstractmethod
    async def _acknowledge(self, messages: list[Message]) -> list[Message]: ...

    @abstractmethod
    async def _change(self, messages: list[Message], lease_s: int, budget_s: float) -> list[Message]:
        """Set the leases to `lease_s` from now; 0 returns the messages. Returns those whose lease was lost."""

    @property
    def facts(self) -> Facts:
        if self._facts is None:
            raise StateError("the queue is not open")
        return self._facts

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if left := await self._receiver.end():
                await self._change(left, 0, 5.0)
        except RolloutError as e:
            log.warning("queue_not_given_back", queue=self._address, error=str(e))
        finally:
            await self._client.close()

    def fits(self, message: Outgoing) -> bool:
        try:
            self._entry(0, message)
        except InputError:
            return False
        return True

    async def enqueue(self, messages: list[Outgoing]) -> list[str]:
        self._check_open()
        lanes: dict[int, list[Entry]] = {}
        for index, message in enumerate(messages):
            order = self._order(message)
            lane = -1 if order is None else zlib.crc32(order.encode("utf-8", "surrogatepass")) % _LANES
            lanes.setdefault(lane, []).append(self._entry(index, message))
        ids: dict[int, str] = {}

        async def send(batches: list[list[Entry]]) -> None:
            for batch in batches:
                ids.update(await self._send(batch))

        most = self._batch_bytes()
        cuts = {lane: cut(entries, self.send_batch, lambda entry: entry.size, most) for lane, entries in lanes.items()}
        unordered = cuts.pop(-1, [])
        await each([*cuts.values(), *([batch] for batch in unordered)], send)
        return [ids[index] for index in range(len(messages))]

    def _batch_bytes(self) -> int:
        return self.facts.max_message_bytes

    async def dequeue(self, limit: int, lease_s: float, wait_s: float = 0.0) -> list[Message]:
        """Receive messages, with several concurrent calls while messages come."""
        self._check_open()
        lease = self._whole(lease_s)
        taken = await self._receiver.take(limit, lease, wait_s)
        return await self._renewed(taken, lease)

    async def _renewed(self, taken: list[Arrived], lease_s: int) -> list[Message]:
        """Extend what waited for a while or has another lease; return the messages that are still ours."""
        now = self._now()
        again = [
            arrived.message
            for arrived in taken
            if now - arrived.at > lease_s / 10 or (self._own_lease_s or arrived.lease_s) != lease_s
        ]
        try:
            lost = await self.extend(again, lease_s) if again else []
        except BaseException:
            self._receiver.put_back(taken)
            raise
        return [arrived.message for arrived in taken if arrived.message not in lost]

    async def extend(self, messages: list[Message], lease_s: float) -> list[Message]:
        self._check_open()
        return await self._change(messages, self._whole(lease_s), max(2.0, min(60.0, lease_s / 4)))

    async def nack(self, messages: list[Message]) -> None:
        self._check_open()
        await self._change(messages, 0, 60.0)

    async def ack(self, messages: list[Message]) -> list[Message]:
        self._check_open()
        return await self._acknowledge(messages)

    async def is_empty(self, lease_s: float) -> bool:
        self._check_open()
        return await self._receiver.look(self._whole(lease_s))

    def _whole(self, lease_s: float) -> int:
        """Return whole seconds, as the service requires."""
        return math.ceil(min(self.facts.max_lease_s, max(self.facts.min_lease_s, lease_s)))

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("the queue is closed")
