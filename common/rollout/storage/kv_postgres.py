"""Key-value on PostgreSQL. The revision log is polled; LISTEN on `direct_url` only makes a watcher read sooner."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

import asyncpg
import structlog
from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from rollout.model.errors import StorageError, StorageUnavailableError
from rollout.storage import kv
from rollout.storage.kv import ChangesPage, Check, GetCheck, KvStorage, ScanCheck, Write
from rollout.storage.port import Change
from rollout.storage.postgres import ERRORS, CommitUnknown, Connection, PostgresEngine, normal_url

log = structlog.get_logger()

POLL_S = 0.5
WRITE_MS = 10_000
CHANNEL = "rollout_kv"

_GET = "SELECT value FROM kv WHERE namespace = $1 AND key = $2"
_GET_MANY = """
SELECT kv.value FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS wanted(namespace, key, n)
  LEFT JOIN kv ON kv.namespace = wanted.namespace AND kv.key = wanted.key ORDER BY wanted.n
"""
_IN_RANGE = "namespace = $1 AND key >= $2 AND ($3::text IS NULL OR key < $3::text)"
_SCAN = f"SELECT key, value FROM kv WHERE {_IN_RANGE} ORDER BY key LIMIT $4"
_LOCK_HEAD = f"{kv.READ_REVISION} FOR UPDATE"
_PUT = """
INSERT INTO kv (namespace, key, value) SELECT * FROM unnest($1::text[], $2::text[], $3::bytea[])
ON CONFLICT (namespace, key) DO UPDATE SET value = excluded.value
"""
_DELETE = """
DELETE FROM kv USING unnest($1::text[], $2::text[]) AS gone(namespace, key)
 WHERE kv.namespace = gone.namespace AND kv.key = gone.key RETURNING kv.namespace, kv.key
"""
_LOG = """
INSERT INTO kv_change (revision, idx, namespace, key, value)
SELECT $1, n, namespace, key, value
  FROM unnest($2::text[], $3::text[], $4::bytea[]) WITH ORDINALITY AS change(namespace, key, value, n)
"""
_PRUNE = "DELETE FROM kv_change WHERE revision <= $1"
_CHANGES = f"""
SELECT namespace, key, value, revision FROM kv_change
 WHERE revision > $4 AND revision <= $5 AND {_IN_RANGE} ORDER BY revision, idx
"""
_WRITTEN = "SELECT namespace, key, value FROM kv_change WHERE revision = $1 ORDER BY idx"


class PostgresStorage(KvStorage):
    """`Storage` in a PostgreSQL database, which ledger and objects may share."""

    def __init__(self, url: str, *, direct_url: str = "", pool_size: int = 4, poll_s: float = POLL_S):
        self._engine = PostgresEngine(url, pool_size=pool_size)
        super().__init__(_Backend(self._engine), poll_s)
        self._direct_url = normal_url(direct_url)
        self._listening: asyncio.Task[None] | None = None
        self._announcing: asyncio.Task[None] | None = None
        self._news = False

    async def open(self) -> None:
        await self._engine.open()
        if self._direct_url and self._listening is None:
            self._listening = asyncio.create_task(self._listen(), name="kv-listen")

    async def close(self) -> None:
        self.stop_watchers()
        for task in (self._listening, self._announcing):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        self._listening = self._announcing = None
        await self._engine.close()

    async def announce(self) -> None:
        """Send NOTIFY after the commit, in a separate transaction; commits meanwhile share the next one."""
        if self._direct_url:
            self._news = True
            if self._announcing is None or self._announcing.done():
                self._announcing = asyncio.create_task(self._notify(), name="kv-notify")

    async def _notify(self) -> None:
        while self._news:
            self._news = False
            # Only a hint: whoever misses it polls.
            with suppress(StorageError, CommitUnknown):
                async with self._engine.write(WRITE_MS) as db:
                    await db.execute(f"NOTIFY {CHANNEL}")

    async def _listen(self) -> None:
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(ERRORS), wait=wait_random_exponential(multiplier=0.2, max=10)
        ):
            with attempt:
                await self._listen_once()

    async def _listen_once(self) -> None:
        connect = cast(Any, asyncpg.connect)  # pyright: ignore[reportUnknownMemberType]
        connection: Any = await connect(self._direct_url, timeout=5, statement_cache_size=0)
        broken = asyncio.Event()

        def on_end(_: object) -> None:
            broken.set()

        def on_notice(*_: object) -> None:
            self.wake()

        try:
            connection.add_termination_listener(on_end)
            await connection.add_listener(CHANNEL, on_notice)
            self.wake()
            await broken.wait()
            log.info("kv_listen_lost", hint="watchers poll until it is back")
            raise ConnectionResetError("the LISTEN connection was closed")
        finally:
            connection.terminate()


class _Backend:
    def __init__(self, engine: PostgresEngine):
        self._engine = engine

    async def get(self, namespace: str, key: str) -> bytes | None:
        async with self._engine.read() as db:
            return await db.fetchval(_GET, namespace, key)

    async def scan(self, namespace: str, prefix: str, limit: int | None) -> list[tuple[str, bytes]]:
        async with self._engine.read() as db:
            return await _scan(db, namespace, prefix, limit)

    async def revision(self) -> int:
        async with self._engine.read() as db:
            return await db.fetchval(kv.READ_REVISION)

    async def apply(self, checks: Sequence[Check], writes: Sequence[Write]) -> list[Write] | None:
        applied = _Applied()
        try:
            async with self._engine.write(WRITE_MS) as db:
                # Locked until COMMIT: writers go one by one, and revisions become visible in their order.
                applied.revision = await db.fetchval(_LOCK_HEAD) + 1
                if not await _hold(db, checks):
                    return None
                applied.done = await _write(db, writes)
                if applied.done:
                    await _log(db, applied.revision, applied.done)
        except CommitUnknown as error:
            if applied.done and not await self._is_written(applied):
                raise StorageUnavailableError(
                    "the connection to PostgreSQL broke at COMMIT: nothing was written"
                ) from error
        return applied.done

    async def _is_written(self, applied: _Applied) -> bool:
        """Wait, by the row lock, until the transaction in doubt is over, and return whether its revision was
        written."""
        try:
            async with self._engine.write(WRITE_MS) as db:
                await db.fetchval(_LOCK_HEAD)
                return [tuple(row) for row in await db.fetch(_WRITTEN, applied.revision)] == applied.done
        except CommitUnknown as error:
            raise StorageUnavailableError(
                "the connection to PostgreSQL broke at COMMIT, and again while it was asked what became of that"
            ) from error

    async def changes(self, namespace: str, prefix: str, after: int) -> ChangesPage:
        async with self._engine.read() as db:
            head = await db.fetchval(kv.READ_REVISION)
            reached = max(after, min(head, after + kv.PAGE_REVISIONS))
            if reached == after:
                return ChangesPage([], after, None)
            floor = await db.fetchval("SELECT MIN(revision) FROM kv_change")
            found = await db.fetch(_CHANGES, namespace, prefix, kv.upper_bound(prefix), after, reached)
            return ChangesPage([Change(*row) for row in found], reached, floor)


class _Applied:
    def __init__(self) -> None:
        self.revision = 0
        self.done: list[Write] = []


async def _scan(db: Connection, namespace: str, prefix: str, limit: int | None) -> list[tuple[str, bytes]]:
    return [tuple(row) for row in await db.fetch(_SCAN, namespace, prefix, kv.upper_bound(prefix), limit)]


async def _hold(db: Connection, checks: Sequence[Check]) -> bool:
    gets = [check for check in checks if isinstance(check, GetCheck)]
    if gets:
        found = await db.fetch(_GET_MANY, [check.namespace for check in gets], [check.key for check in gets])
        if [row[0] for row in found] != [check.value for check in gets]:
            return False
    for check in checks:
        if isinstance(check, ScanCheck):
            found = await _scan(db, check.namespace, check.prefix, check.limit)
            if tuple(found) != check.found:
                return False
    return True


async def _write(db: Connection, writes: Sequence[Write]) -> list[Write]:
    """Write all deletions, then all insertions: each key occurs at most once, so the order does not matter."""
    deleted: set[tuple[str, str]] = set()
    gone = [write for write in writes if write[2] is None]
    if gone:
        found = await db.fetch(_DELETE, [write[0] for write in gone], [write[1] for write in gone])
        deleted = {tuple(row) for row in found}
    puts = [write for write in writes if write[2] is not None]
    if puts:
        await db.execute(_PUT, *(list(column) for column in zip(*puts, strict=True)))
    return [write for write in writes if write[2] is not None or (write[0], write[1]) in deleted]


async def _log(db: Connection, revision: int, done: list[Write]) -> None:
    await db.execute(_LOG, revision, *(list(column) for column in zip(*done, strict=True)))
    await db.execute(f"UPDATE kv_head SET revision = {revision} WHERE one = 1")
    if revision % kv.PRUNE_EVERY == 0:
        await db.execute(_PRUNE, revision - kv.KEEP_REVISIONS)
