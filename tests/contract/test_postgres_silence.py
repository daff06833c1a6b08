"""A database that is there and says nothing: a link that was cut, where nobody is told; and one that breaks twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from postgres_link import Link, link_to
from rollout.model.errors import StorageUnavailableError
from rollout.objects import postgres as objects
from rollout.objects import postgres_pins
from rollout.storage.kv_postgres import PostgresStorage
from rollout.storage.postgres import CommitUnknown, PostgresEngine
from rollout_coordinator.ledger.port import LeaseRow
from rollout_coordinator.ledger.postgres import PostgresLedger

PATIENCE_S = 20.0


@asynccontextmanager
async def linked(url: str) -> AsyncIterator[tuple[Link, PostgresEngine]]:
    async with link_to(url) as (link, through):
        engine = PostgresEngine(through, pool_size=2)
        await engine.open()
        try:
            yield link, engine
        finally:
            link.heal()
            await engine.close()


@pytest.mark.parametrize("waiting_for", ["BEGIN", "statement", "COMMIT"])
async def test_who_waits_for_a_silent_database_can_be_cancelled(postgres_url: str, waiting_for: str) -> None:
    """A leader whose database went silent must end its tasks, or it never stands by again."""
    async with linked(postgres_url) as (link, engine):
        async with engine.write(30_000) as db:
            await db.execute("CREATE TABLE t (n int)")
        started = asyncio.Event()

        async def write() -> None:
            if waiting_for == "BEGIN":
                started.set()
                link.cut()
            async with engine.write(30_000) as db:
                if waiting_for == "statement":
                    started.set()
                    link.cut()
                await db.execute("INSERT INTO t VALUES (1)")
                if waiting_for == "COMMIT":
                    started.set()
                    link.cut()

        task = asyncio.create_task(write())
        await started.wait()
        await asyncio.sleep(0.2)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=PATIENCE_S)
        assert done and task.cancelled(), "the cancellation was lost on the way out"
        link.heal()
        async with engine.write(5_000) as db:  # nothing of it is left in the pool, and no lock is held
            await db.execute("DROP TABLE t")


async def test_a_silent_database_is_told_as_unavailable(postgres_url: str) -> None:
    async with linked(postgres_url) as (link, engine):
        link.cut()
        with pytest.raises(StorageUnavailableError):
            async with engine.write(500) as db:
                await db.execute("SELECT 1")
        link.heal()
        async with engine.write(5_000) as db:
            assert await db.fetchval("SELECT 1") == 1


@pytest.mark.parametrize("silent_at", ["BEGIN", "statement"])
async def test_a_read_of_a_silent_database_ends(
    postgres_url: str, silent_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TCP alone would try for a quarter of an hour, and hold a connection of the pool."""
    monkeypatch.setattr(PostgresEngine, *(("BEGIN_S", 1.0) if silent_at == "BEGIN" else ("READ_MS", 1000)))
    async with linked(postgres_url) as (link, engine):

        async def read() -> None:
            if silent_at == "BEGIN":
                link.cut()
            async with engine.read() as db:
                link.cut()
                await db.fetchval("SELECT 1")

        done, _ = await asyncio.wait({asyncio.create_task(read())}, timeout=PATIENCE_S)
        assert done, "it waits for ever"
        assert isinstance(done.pop().exception(), StorageUnavailableError)
        link.heal()
        async with engine.read() as db:
            assert await db.fetchval("SELECT 1") == 1


async def test_a_write_that_a_silent_database_takes_half_of_ends(postgres_url: str) -> None:
    """A leader's commit: while it waits, its workers wait with it."""
    async with linked(postgres_url) as (link, engine):

        async def write() -> None:
            async with engine.write(500) as db:
                link.cut()
                await db.execute("SELECT 1")

        done, _ = await asyncio.wait({asyncio.create_task(write())}, timeout=PATIENCE_S)
        assert done, "it waits for ever"
        assert isinstance(done.pop().exception(), StorageUnavailableError)


async def test_a_silent_database_is_told_to_who_wants_an_object(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_pins, "COMMAND_TIMEOUT_S", 1.0)
    async with link_to(postgres_url) as (link, through):
        store = objects.PostgresObjectStore(through, pool_size=2)
        await store.open()
        link.cut()
        asking = asyncio.create_task(store.has([bytes(32)]))
        done, _ = await asyncio.wait({asking}, timeout=PATIENCE_S)
        assert done, "it waits for ever"
        assert isinstance(asking.exception(), StorageUnavailableError)
        link.heal()
        assert await store.has([bytes(32)]) == [False]
        await store.close()


async def test_a_silent_leader_does_not_keep_the_lease_locked(postgres_url: str) -> None:
    """Cut between two messages of one statement the server waits for ever, with the lease's row locked: steal it."""
    challenger = PostgresLedger(postgres_url, ttl=3.0)
    await challenger.open()
    held = LeaseRow("leader", 0, 0, 0, False, "a:1")
    assert await challenger.insert_lease(held)
    async with linked(postgres_url) as (link, engine):
        locked, over = asyncio.Event(), asyncio.Event()

        async def lead() -> None:
            async with engine.write(900) as db:
                await db.execute("UPDATE lease SET batch = batch + 1 WHERE epoch = 0 AND batch = 0")
                await db.prepare("SELECT 1")  # the server has read half of a statement and waits for the rest
                link.cut()
                locked.set()
                await over.wait()

        leading = asyncio.create_task(lead())
        await locked.wait()
        await asyncio.sleep(1.5)  # longer than every bound of that transaction
        assert await challenger.swap_lease(held, LeaseRow("challenger", 1, 0, 1, False, "b:1"))
        over.set()
        link.heal()
        with pytest.raises((CommitUnknown, StorageUnavailableError)):
            await leading
    row = await challenger.read_lease()
    assert row is not None and (row.holder, row.epoch, row.batch) == ("challenger", 1, 0)
    await challenger.close()


async def test_who_swaps_a_value_over_a_link_that_breaks_twice_is_told_the_truth_or_that_it_is_away(
    postgres_url: str,
) -> None:
    """Also when it breaks at COMMIT, and again while it is asked what became of that."""
    done, away = 0, list[str]()
    async with link_to(postgres_url) as (link, through):
        storage = PostgresStorage(through)
        await storage.open()
        for first in range(9, 21):
            for second in range(first + 1, first + 11):
                value, key = b"v", f"{first}/{second}"
                link.messages, link.break_at = 0, {first, second}
                try:
                    assert await storage.cas("n", key, None, value)
                    done += 1
                except StorageUnavailableError as error:
                    away.append(str(error))
                    continue
                link.break_at = set()
                assert await storage.get("n", key) == value
        link.break_at = set()
        await storage.close()
    assert done > 10 and any("broke at COMMIT, and again" in told for told in away)
