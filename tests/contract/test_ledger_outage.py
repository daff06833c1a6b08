"""Full disks, databases that go away and return, and a COMMIT whose answer never came."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from ledger_rows import Writer, item_rows, log_row, result_rows
from postgres import PostgresServer
from rollout.model.errors import FencedError, StorageFullError, StorageUnavailableError
from rollout.storage import postgres as engine
from rollout.storage.kv_postgres import PostgresStorage
from rollout.storage.kv_sqlite import SqliteStorage
from rollout.storage.postgres import translate
from rollout_coordinator.core.step import LoadPending, Writes
from rollout_coordinator.ledger import Fence
from rollout_coordinator.ledger.postgres import PostgresLedger
from rollout_coordinator.ledger.sqlite import SqliteLedger

# ---- a full disk


async def test_a_full_disk_fails_the_commit_and_nothing_else(tmp_path: Path) -> None:
    ledger = SqliteLedger(tmp_path / "rollout.db", max_pages=120)
    await ledger.open()
    writer = Writer(ledger)
    await writer.lead()
    await writer.run(5)
    kept = 5
    with pytest.raises(StorageFullError, match="disk"):
        while True:
            payloads = [bytes([kept % 256]) * 3000] * 10
            await writer.commit(
                Writes(items=[item_rows(1, 10, kept, payloads)], logs={1: log_row(submitted=kept + 10)})
            )
            kept += 10
    assert (await ledger.snapshot()).logs[0].submitted == kept
    loaded = await ledger.pending(LoadPending(1, 1, 0, 10_000, 1 << 30))
    assert (len(loaded.items), loaded.next_seq) == (kept, kept)
    await writer.commit(Writes())  # small ones still fit: the fence stayed where it was
    await ledger.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "rollout.db")) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


async def test_a_full_disk_fails_a_put(tmp_path: Path) -> None:
    storage = SqliteStorage(tmp_path / "rollout.db", max_pages=60)
    await storage.open()
    with pytest.raises(StorageFullError):
        await storage.put("n", "big", b"x" * 1_000_000)
    assert await storage.get("n", "big") is None
    await storage.put("n", "small", b"x")
    await storage.close()


def test_postgres_errors_by_kind() -> None:
    full: Any = asyncpg.DiskFullError("could not extend file")
    assert isinstance(translate(full), StorageFullError)
    for gone in (
        asyncpg.CannotConnectNowError("the database system is starting up"),
        asyncpg.AdminShutdownError("terminating connection"),
        asyncpg.TooManyConnectionsError("sorry, too many clients already"),
        asyncpg.ConnectionDoesNotExistError("closed"),
        ConnectionRefusedError("refused"),
        ConnectionResetError("reset"),
        TimeoutError(),
    ):
        assert isinstance(translate(gone), StorageUnavailableError), gone


# ---- another program holds the file


async def test_a_locked_file_is_unavailable_not_broken(tmp_path: Path) -> None:
    ledger = SqliteLedger(tmp_path / "rollout.db")
    await ledger.open()
    writer = Writer(ledger)
    await writer.lead()
    with contextlib.closing(sqlite3.connect(tmp_path / "rollout.db", isolation_level=None)) as shell:
        shell.execute("BEGIN IMMEDIATE")
        waiting = asyncio.ensure_future(writer.run(1))
        assert (await ledger.snapshot()).runs == []  # reads go on
        shell.execute("ROLLBACK")
        await waiting
    await ledger.close()


async def test_a_long_read_does_not_block_the_writer(tmp_path: Path) -> None:
    ledger = SqliteLedger(tmp_path / "rollout.db")
    await ledger.open()
    writer = Writer(ledger)
    await writer.lead()
    await writer.run(1)
    with contextlib.closing(sqlite3.connect(tmp_path / "rollout.db", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT COUNT(*) FROM item").fetchone() == (1,)
        await writer.commit(Writes(items=[item_rows(1, 9, 1)]))
        assert reader.execute("SELECT COUNT(*) FROM item").fetchone() == (1,)
    await ledger.close()


# ---- PostgreSQL goes away and returns


@pytest.fixture
async def ledger(postgres_server: PostgresServer) -> AsyncIterator[PostgresLedger]:
    opened = PostgresLedger(postgres_server.url, pool_size=3, ttl=3.0)
    await opened.open()
    yield opened
    await opened.close()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT])
async def test_a_server_that_stops_and_starts(
    postgres_server: PostgresServer, ledger: PostgresLedger, how: signal.Signals
) -> None:
    writer = Writer(ledger)
    await writer.lead()
    await writer.run(3)
    storage = PostgresStorage(postgres_server.url, direct_url=postgres_server.url, poll_s=0.1)
    await storage.open()
    watch = storage.watch("n", after=await storage.revision())
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.to_thread(postgres_server.stop, how)
    with pytest.raises(StorageUnavailableError):
        await writer.commit(Writes(results=[result_rows([0])]))
    with pytest.raises(StorageUnavailableError):
        await ledger.snapshot()
    with pytest.raises(StorageUnavailableError):
        await storage.ping()
    await asyncio.to_thread(postgres_server.start)
    await writer.commit(Writes(results=[result_rows([0])]))
    assert len((await ledger.pending(LoadPending(1, 1, 0, 9, 999))).items) == 2
    await storage.put("n", "k", b"back")
    assert (await asyncio.wait_for(waiting, 60)).value == b"back"
    await storage.close()


async def test_opening_without_a_server(postgres_server: PostgresServer) -> None:
    await asyncio.to_thread(postgres_server.stop)
    ledger = PostgresLedger(postgres_server.url)
    with pytest.raises(StorageUnavailableError):
        await ledger.open()
    await asyncio.to_thread(postgres_server.start)
    await ledger.open()
    await ledger.close()


async def test_a_stopped_leader_cannot_keep_others_out(postgres_url: str) -> None:
    """It holds the row's lock in an idle transaction; the server ends that after TTL/3."""
    stopped, challenger = PostgresLedger(postgres_url, ttl=0.9), PostgresLedger(postgres_url, ttl=6.0)
    await stopped.open()
    await challenger.open()
    writer = Writer(stopped)
    await writer.lead()
    with pytest.raises(StorageUnavailableError):
        async with stopped._engine.write(stopped._bound_ms) as db:
            await db.execute("UPDATE lease SET batch = batch + 1 WHERE epoch = 0 AND batch = 0")
            assert await challenger.renew_lease("me", 0)  # waits for the row's lock
            await db.execute("SELECT 1")
    lease = await challenger.read_lease()
    assert lease is not None and (lease.batch, lease.beat) == (0, 1)
    for ledger in (stopped, challenger):
        await ledger.close()


@pytest.mark.parametrize("arrives", [True, False])
async def test_a_commit_without_an_answer_is_looked_up(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
    ledger = PostgresLedger(postgres_url, ttl=3.0)
    await ledger.open()
    writer = Writer(ledger)
    await writer.lead()
    await writer.run(3)
    real = engine._Connection.execute
    cut = [True]

    async def execute(self: Any, query: str, *args: Any, **options: Any) -> Any:
        if query == "COMMIT" and cut and cut.pop():
            if arrives:
                await real(self, query, *args, **options)
            self.terminate()
            raise ConnectionResetError("cut for the test")
        return await real(self, query, *args, **options)

    monkeypatch.setattr(engine._Connection, "execute", execute)
    writes = Writes(results=[result_rows([0])])
    if arrives:
        await writer.commit(writes)
    else:
        with pytest.raises(StorageUnavailableError, match="nothing was written"):
            await writer.commit(writes)
        await writer.commit(writes)  # the same fence still holds, and the row is not there yet
    with pytest.raises(FencedError):
        await ledger.commit(Fence(0, 1), Writes())
    assert len((await ledger.pending(LoadPending(1, 1, 0, 9, 999))).items) == 2
    await ledger.close()
