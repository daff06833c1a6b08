"""The local queue: the suite of every queue (`queue_contract`), and what only this one promises."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from queue_contract import QueueContract, out
from rollout.config.cloud import CloudSection
from rollout.config.settings import EmbeddedStorage, StorageSection
from rollout.model.errors import ConfigError, InputError, StateError, StorageFullError
from rollout.model.ids import is_ulid
from rollout.queues import Outgoing, Place, open_queue
from rollout.queues import local as local_module
from rollout.queues.local import NAMESPACE, LocalQueue
from rollout.storage import open_storage


class MemoryStorage:
    """Key-value with transactions that roll back; `fail` makes the next commit fail."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], bytes] = {}
        self.fail: Exception | None = None
        self.commits = 0

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        before = dict(self.rows)
        try:
            yield self
            if self.fail is not None:
                raise self.fail
            self.commits += 1
        except BaseException:
            self.rows = before
            raise

    async def get(self, namespace: str, key: str) -> bytes | None:
        return self.rows.get((namespace, key))

    async def put(self, namespace: str, key: str, value: bytes) -> None:
        self.rows[namespace, key] = value

    async def delete(self, namespace: str, key: str) -> bool:
        return self.rows.pop((namespace, key), None) is not None

    async def scan(self, namespace: str, prefix: str = "", limit: int | None = None) -> list[tuple[str, bytes]]:
        found = sorted((k, v) for (n, k), v in self.rows.items() if n == namespace and k.startswith(prefix))
        return found[:limit]


class Clock:
    def __init__(self) -> None:
        self.s = 1000.0

    def __call__(self) -> float:
        return self.s


class TestLocal(QueueContract):
    wait_s = 0.0

    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    async def queue(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalQueue]:
        monkeypatch.setattr(local_module, "MAX_MESSAGE_BYTES", 1000)
        queue = LocalQueue(MemoryStorage(), now=clock)  # type: ignore[arg-type]
        await queue.open()
        yield queue
        await queue.close()

    @pytest.fixture
    def pass_time(self, clock: Clock) -> Callable[[float], Awaitable[None]]:
        async def pass_time(seconds: float) -> None:
            clock.s += seconds

        return pass_time

    async def test_expired_ones_come_first_and_in_order(self, queue: LocalQueue, clock: Clock) -> None:
        await queue.enqueue(out(b"a", b"b", b"c", b"d"))
        await queue.dequeue(1, 5)
        await queue.dequeue(2, 1)
        clock.s += 10
        assert await queue.depth() == 4
        assert [m.body for m in await queue.dequeue(4, 10)] == [b"a", b"b", b"c", b"d"]

    async def test_a_lost_lease_acknowledges_nothing(self, queue: LocalQueue, clock: Clock) -> None:
        await queue.enqueue(out(b"a"))
        first = await queue.dequeue(1, 1)
        clock.s += 2
        await queue.ack(first)
        await queue.nack(first)
        (second,) = await queue.dequeue(1, 10)
        assert second.deliveries == 2


async def local(storage: MemoryStorage, **options: Any) -> LocalQueue:
    queue = LocalQueue(storage, **options)  # type: ignore[arg-type]
    await queue.open()
    return queue


async def test_a_restart_replays_in_order_what_was_not_acknowledged() -> None:
    storage = MemoryStorage()
    queue = await local(storage)
    ids = await queue.enqueue([Outgoing(bytes([i])) for i in range(6)])
    got = await queue.dequeue(3, 60)
    await queue.ack(got[1:2])
    await queue.nack(got[:1])
    again = await local(storage)
    assert [m.id for m in await again.dequeue(10, 60)] == [ids[0], *ids[2:]]


async def test_on_the_real_store(tmp_path: Path) -> None:
    section = StorageSection(embedded=EmbeddedStorage(path=str(tmp_path / "rollout.db")))
    storage = open_storage(section)
    await storage.open()
    queue = open_queue("local", Place(""), CloudSection(), storage)
    await queue.open()
    ids = await queue.enqueue(out(b"a" * 5000, b"", b"c"))
    await queue.ack(await queue.dequeue(1, 60))
    await storage.close()
    storage = open_storage(section)
    await storage.open()
    again = LocalQueue(storage, hot=1)
    await again.open()
    got = await again.dequeue(5, 60)
    assert [(m.id, m.body) for m in got] == [(ids[1], b""), (ids[2], b"c")]
    await again.ack(got)
    await storage.close()


async def test_ids_are_ulids_that_grow_even_if_the_clock_goes_back() -> None:
    storage = MemoryStorage()
    ids: list[str] = []
    for wall in (5000, 4000, 4000, 9000):
        queue = await local(storage, wall_ms=lambda wall=wall: wall)
        ids += await queue.enqueue(out(b"x", b"y"))
        ids += await queue.enqueue(out(b"z"))
    assert all(map(is_ulid, ids))
    assert ids == sorted(set(ids))


async def test_a_long_backlog_stays_in_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_module, "_PAGE", 7)
    storage = MemoryStorage()
    queue = await local(storage, hot=10)
    ids = await queue.enqueue([Outgoing(str(i).encode()) for i in range(100)])
    assert len(queue._hot) == 10
    again = await local(storage, hot=10)
    assert len(again._hot) == 10
    for reader in (queue, again):
        got = [m for _ in range(10) for m in await reader.dequeue(10, 60)]
        assert [m.id for m in got] == ids
        assert [m.body for m in got] == [str(i).encode() for i in range(100)]


async def test_nothing_shows_before_it_is_durable() -> None:
    storage = MemoryStorage()
    queue = await local(storage)
    storage.fail = StorageFullError()
    with pytest.raises(StorageFullError):
        await queue.enqueue(out(b"a"))
    assert await queue.depth() == 0
    assert storage.rows == {}
    storage.fail = None
    await queue.enqueue(out(b"b"))
    got = await queue.dequeue(1, 60)
    storage.fail = StorageFullError()
    with pytest.raises(StorageFullError):
        await queue.ack(got)
    storage.fail = None
    await queue.ack(got)  # still ours
    assert storage.rows == {}


async def test_one_transaction_for_many() -> None:
    storage = MemoryStorage()
    queue = await local(storage)
    await queue.enqueue(out(*[b"x"] * 500))
    await queue.ack(await queue.dequeue(500, 60))
    assert storage.commits == 2


async def test_queues_of_one_store_are_apart() -> None:
    storage = MemoryStorage()
    one, two = await local(storage, name="one"), await local(storage, name="two")
    await one.enqueue(out(b"1"))
    assert await two.depth() == 0
    assert next(iter(storage.rows))[0] == NAMESPACE
    with pytest.raises(InputError):
        LocalQueue(storage, name="a/b")  # type: ignore[arg-type]


async def test_opening_by_name() -> None:
    storage: Any = MemoryStorage()
    queue = open_queue("local", Place("rows"), CloudSection(), storage)
    await queue.open()
    assert queue.facts.name == "rows"
    await queue.enqueue(out(b"x"))
    await queue.close()
    with pytest.raises(StateError):
        await queue.enqueue(out(b"x"))
    with pytest.raises(ConfigError, match="storage"):
        open_queue("local", Place("rows"), CloudSection())
    with pytest.raises(ConfigError, match='unknown backend "kafka"; known: local'):
        open_queue("kafka", Place("rows"), CloudSection())
