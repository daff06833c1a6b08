"""Queue in the key-value store: durable before it is visible, replayed in order after a restart.

The id of each message (26 bytes) is always in memory, the rest only near the head of the queue, in the hot deque. Later
messages are read from storage in order when the head reaches them, so a long backlog does not grow the process.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollout.config.cloud import CloudSection
from rollout.model.errors import ConfigError, InputError, StateError
from rollout.model.ids import make_ulid
from rollout.queues.port import Facts, Message, Outgoing, Place
from rollout.storage.port import Storage

NAMESPACE = "cloudlocal_queue"
HOT_MESSAGES = 10_000
MAX_MESSAGE_BYTES = 64 << 20
_PAGE = 1000
_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def open_queue(place: Place, cloud: CloudSection, storage: Storage | None) -> LocalQueue:
    """Return the queue named `place.address`, or "default". Raises ConfigError without storage."""
    if storage is None:
        raise ConfigError("a local queue is kept in the cluster's storage, and none was given")
    return LocalQueue(storage, name=place.address or "default")


@dataclass(slots=True)
class _Leased:
    row: bytes
    deadline: float
    receipt: int


class LocalQueue:
    """Queue for one process at a time, stored as `cloudlocal_queue/<name>/<ulid>`. Groups are stored but block nothing.

    `now` returns monotonic seconds for leases. `wall_ms` and `entropy` make the ULIDs, which grow even if the clock
    does not.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        name: str = "default",
        hot: int = HOT_MESSAGES,
        now: Callable[[], float] = time.monotonic,
        wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:
        if not name or "/" in name:
            raise InputError(f"a queue's name must not be empty nor hold a slash, got {name!r}")
        self.facts = Facts(
            name=name,
            max_lease_s=math.inf,
            max_held_s=math.inf,
            max_in_flight=sys.maxsize,
            max_message_bytes=MAX_MESSAGE_BYTES,
        )
        self._storage = storage
        self._prefix = name + "/"
        self._hot_limit = hot
        self._now = now
        self._wall_ms = wall_ms
        self._entropy = entropy
        self._front: deque[str] = deque()  # nacked and expired ones, in the order they come again
        self._cold: deque[str] = deque()  # the rest, in order of id
        self._hot: dict[str, bytes] = {}
        self._leased: dict[str, _Leased] = {}
        self._deadlines: list[tuple[float, str, int]] = []
        self._deliveries: dict[str, int] = {}
        self._receipts = 0
        self._last_ms = 0
        self._last_low = 0
        self._changed = asyncio.Event()
        self._closed = False
        self._enqueuing = asyncio.Lock()

    async def open(self) -> None:
        """Replay the messages of an earlier process in order of id; its leases are void."""
        await self._replay(self._prefix)
        if self._cold:
            # Ids of this process must sort behind those, also if the clock was set back meanwhile.
            self._last_ms = _milliseconds(self._cold[-1])

    async def _replay(self, prefix: str) -> None:
        """Replay in order, one page at a time: if a prefix holds more than a page, each longer prefix is read on its
        own."""
        rows = await self._storage.scan(NAMESPACE, prefix, _PAGE)
        if len(rows) == _PAGE:
            for character in _CROCKFORD:
                await self._replay(prefix + character)
            return
        for key, row in rows:
            name = key.removeprefix(self._prefix)
            self._cold.append(name)
            self._keep_hot(name, row)

    def fits(self, message: Outgoing) -> bool:
        return len(_encode(message)) <= MAX_MESSAGE_BYTES

    async def enqueue(self, messages: list[Outgoing]) -> list[str]:
        self._check_open()
        rows = [_encode(message) for message in messages]
        for index, row in enumerate(rows):
            if len(row) > MAX_MESSAGE_BYTES:
                raise InputError(
                    f"a message of {len(row):,} bytes is too large: a local queue takes {MAX_MESSAGE_BYTES:,}",
                    index=index,
                )
        async with self._enqueuing:  # so that the order of ids is the order in the queue
            names = self._make_ids(len(rows))
            async with self._storage.transaction() as tx:
                for name, row in zip(names, rows, strict=True):
                    await tx.put(NAMESPACE, self._prefix + name, row)
            for name, row in zip(names, rows, strict=True):
                self._cold.append(name)
                self._keep_hot(name, row)
        self._wake()
        return names

    async def dequeue(self, limit: int, lease_s: float, wait_s: float = 0.0) -> list[Message]:
        self._check_open()
        until = self._now() + wait_s
        while True:
            if taken := await self._take(limit, lease_s):
                return taken
            if limit <= 0:
                return []
            if self._front or self._cold:
                continue
            left = until - self._now()
            if left <= 0 or self._closed:
                return []
            if self._deadlines:
                left = min(left, max(0.0, self._deadlines[0][0] - self._now()))
            self._changed.clear()
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def extend(self, messages: list[Message], lease_s: float) -> list[Message]:
        self._expire()
        lost: list[Message] = []
        for message in messages:
            held = self._holder(message)
            if held is None:
                lost.append(message)
                continue
            held.deadline = self._now() + lease_s
            heapq.heappush(self._deadlines, (held.deadline, message.id, held.receipt))
        return lost

    async def ack(self, messages: list[Message]) -> list[Message]:
        """Acknowledge messages. One whose lease was lost belongs to another receiver and is left alone."""
        self._expire()
        mine = [m for m in messages if self._holder(m) is not None]
        lost = [m for m in messages if self._holder(m) is None]
        if not mine:
            return lost
        held = [(m.id, self._leased.pop(m.id)) for m in mine]  # first: no lease may end while they are deleted
        try:
            async with self._storage.transaction() as tx:
                for message in mine:
                    await tx.delete(NAMESPACE, self._prefix + message.id)
        except BaseException:
            for name, lease in held:
                self._leased[name] = lease
                heapq.heappush(self._deadlines, (lease.deadline, name, lease.receipt))
            raise
        for name, _ in held:
            self._deliveries.pop(name, None)
        return lost

    async def nack(self, messages: list[Message]) -> None:
        """Return messages to the front, in the order given. Storage is unchanged, so a restart replays them too."""
        self._expire()
        for message in reversed(messages):
            held = self._holder(message)
            if held is not None:
                self._give_back(message.id, held)
        self._wake()

    async def depth(self) -> int:
        """Return the number of messages that are neither leased nor acknowledged."""
        self._expire()
        return len(self._front) + len(self._cold)

    async def is_empty(self, lease_s: float) -> bool:
        return await self.depth() == 0

    async def close(self) -> None:
        self._closed = True
        self._wake()

    async def _take(self, limit: int, lease_s: float) -> list[Message]:
        self._expire()
        names: list[str] = []
        while len(names) < limit and (self._front or self._cold):
            names.append(self._front.popleft() if self._front else self._cold.popleft())
        try:
            rows = await self._rows(names)
        except BaseException:
            self._front.extendleft(reversed(names))
            raise
        taken: list[Message] = []
        for name, row in zip(names, rows, strict=True):
            if row is None:  # deleted by hand
                continue
            self._receipts += 1
            deliveries = self._deliveries[name] = self._deliveries.get(name, 0) + 1
            held = self._leased[name] = _Leased(row, self._now() + lease_s, self._receipts)
            heapq.heappush(self._deadlines, (held.deadline, name, held.receipt))
            taken.append(_decode(row, name, str(held.receipt), deliveries))
        return taken

    async def _rows(self, names: list[str]) -> list[bytes | None]:
        """Return rows from memory, and those behind the hot deque in one transaction."""
        missing = [name for name in names if name not in self._hot]
        loaded: dict[str, bytes | None] = {}
        if missing:
            async with self._storage.transaction() as tx:
                for name in missing:
                    loaded[name] = await tx.get(NAMESPACE, self._prefix + name)
        return [self._hot.pop(name, None) if name not in loaded else loaded[name] for name in names]

    def _expire(self) -> None:
        """Return messages with expired leases, the oldest first in line."""
        late: list[tuple[str, _Leased]] = []
        while self._deadlines and self._deadlines[0][0] <= self._now():
            deadline, name, receipt = heapq.heappop(self._deadlines)
            held = self._leased.get(name)
            if held is not None and held.receipt == receipt and held.deadline == deadline:
                late.append((name, held))
        for name, held in sorted(late, reverse=True):
            self._give_back(name, held)

    def _give_back(self, name: str, held: _Leased) -> None:
        del self._leased[name]
        self._front.appendleft(name)
        self._keep_hot(name, held.row)

    def _holder(self, message: Message) -> _Leased | None:
        held = self._leased.get(message.id)
        return held if held is not None and str(held.receipt) == message.receipt else None

    def _keep_hot(self, name: str, row: bytes) -> None:
        if len(self._hot) < self._hot_limit:
            self._hot[name] = row

    def _make_ids(self, count: int) -> list[str]:
        ms = max(self._wall_ms(), self._last_ms)
        if ms > self._last_ms:
            self._last_low = int.from_bytes(self._entropy(9), "big")  # 72 of 80 bits: room to count up
        elif self._last_low == 0:  # the first ids of this process, in the millisecond of the last replayed
            ms += 1
            self._last_low = int.from_bytes(self._entropy(9), "big")
        names: list[str] = []
        for _ in range(count):
            self._last_low += 1
            names.append(make_ulid(ms, self._last_low.to_bytes(10, "big")))
        self._last_ms = ms
        return names

    def _wake(self) -> None:
        self._changed.set()

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("the queue is closed")


def _encode(message: Outgoing) -> bytes:
    """Encode a message as a line of JSON, empty if there is nothing to record, followed by the body."""
    head: dict[str, object] = {}
    if attributes := message.all_attributes:
        head["attributes"] = attributes
    if message.group:
        head["group"] = message.group
    line = json.dumps(head, separators=(",", ":")).encode() if head else b""
    return line + b"\n" + message.body


def _decode(row: bytes, name: str, receipt: str, deliveries: int) -> Message:
    line, _, body = row.partition(b"\n")
    head: dict[str, Any] = json.loads(line) if line else {}
    return Message(name, body, receipt, deliveries, head.get("attributes", {}), head.get("group", ""))


def _milliseconds(ulid: str) -> int:
    value = 0
    for character in ulid[:10]:
        value = value * 32 + _CROCKFORD.index(character)
    return value
