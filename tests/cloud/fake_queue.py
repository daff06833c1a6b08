"""A queue in memory that keeps the port's contract, can be away, and delivers what it is told to; and a run's ledger."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

from rollout.model.errors import ConflictError, InputError, UnavailableError
from rollout.model.item import NewItem
from rollout.queues.port import Facts, Message, Outgoing
from rollout.wire.v1 import runs_pb2 as pb


class FakeQueue:
    """`blind`: as Pub/Sub, which knows no depth, and whose receive calls go on trying while the queue is `away`."""

    def __init__(self, **facts: Any) -> None:
        given = {"name": "fake", "max_lease_s": 1e9, "max_held_s": 1e9, "max_in_flight": 10**9, "dead_letter": "dead"}
        self.facts = Facts(**{**given, "max_message_bytes": 1 << 20, **facts})
        self.waiting: deque[Message] = deque()
        self.leased: dict[str, Message] = {}
        self.deleted: list[str] = []
        self.sent: list[Outgoing] = []
        self.away = self.blind = False
        self.opened = self.closed = False
        self.lose: set[str] = set()
        self.receipts = self.asked = 0
        self._came = asyncio.Event()

    def put(self, *bodies: bytes, id: str = "") -> None:
        for body in bodies:
            self.receipts += 1
            self.waiting.append(Message(id or f"m{self.receipts}", body, f"r{self.receipts}", 1))
        self._came.set()

    def _check(self) -> None:
        if self.away:
            raise UnavailableError("no route to it")

    async def open(self) -> None:
        self._check()
        self.opened = True

    async def close(self) -> None:
        self.closed = True

    def fits(self, message: Outgoing) -> bool:
        return len(message.body) <= self.facts.max_message_bytes

    async def enqueue(self, messages: list[Outgoing]) -> list[str]:
        self._check()
        for index, message in enumerate(messages):
            if not self.fits(message):
                raise InputError("it is too large", index=index)
        self.sent += messages
        return [str(len(self.sent))] * len(messages)

    async def dequeue(self, limit: int, lease_s: float, wait_s: float = 0.0) -> list[Message]:
        self.asked += 1
        if not self.blind:
            self._check()
        if not self.waiting or self.away:
            self._came.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._came.wait()
            except TimeoutError:
                return []
        found = [self.waiting.popleft() for _ in range(min(limit, len(self.waiting)))]
        self.leased |= {message.receipt: message for message in found}
        return found

    async def extend(self, messages: list[Message], lease_s: float) -> list[Message]:
        self._check()
        return [message for message in messages if message.receipt not in self.leased]

    async def ack(self, messages: list[Message]) -> list[Message]:
        self._check()
        self.deleted += [message.id for message in messages if self.leased.pop(message.receipt, None)]
        return [message for message in messages if message.id in self.lose]

    async def nack(self, messages: list[Message]) -> None:
        self._check()
        self.waiting.extendleft(reversed([self.leased.pop(message.receipt) for message in messages]))
        self._came.set()

    async def depth(self) -> int | None:
        if self.blind:
            return None
        self._check()
        return len(self.waiting)

    async def is_empty(self, lease_s: float) -> bool:
        self._check()
        return not self.waiting


class FakeRun:
    """Submitting as `Runs.submit` does it, into a list. `hold`: nothing becomes durable meanwhile. `late`: an item of
    another submitter, which comes before the next one. `taken`: items that came here."""

    def __init__(self) -> None:
        self.ids: list[bytes] = []
        self.payloads: list[Any] = []
        self.sealed = False
        self.taken = 0
        self.hold = asyncio.Event()
        self.hold.set()
        self.cut_off: int | None = None
        self.late: NewItem | None = None

    async def submit(self, items: Callable[[int], Iterable[NewItem | None]], durable: Callable[[int], None]) -> int:
        if self.sealed:
            return len(self.ids)
        iterator = iter(items(len(self.ids)))
        end = object()
        while (item := await asyncio.to_thread(next, iterator, end)) is not end:
            self.taken += 1
            await self.hold.wait()
            if isinstance(item, NewItem):
                if self.late is not None:
                    late, self.late = self.late, None
                    self.ids.append(late.id)
                    self.payloads.append(late.payload)
                    raise ConflictError(f"seq {len(self.ids) - 1} holds another item")
                if item.id in self.ids:
                    raise ConflictError("the same item twice")
                self.ids.append(item.id)
                self.payloads.append(item.payload)
                if self.cut_off == len(self.ids):
                    raise asyncio.CancelledError  # in the ledger, and nobody was told
                durable(len(self.ids))
        self.sealed = True
        return len(self.ids)

    async def items(self, run_id: str, which: str = "all", *, from_seq: int = 0) -> AsyncGenerator[pb.ItemsReply, None]:
        for start in range(from_seq, len(self.ids), 3):
            page = [pb.ItemStatus(seq=seq, id=self.ids[seq]) for seq in range(start, min(start + 3, len(self.ids)))]
            yield pb.ItemsReply(items=page, next_seq=page[-1].seq + 1)
        yield pb.ItemsReply(end=True, next_seq=len(self.ids))
