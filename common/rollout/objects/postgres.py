"""Objects as rows: chunks in the database, so that a standby needs nothing else."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, cast

import asyncpg
from blake3 import blake3

from rollout.config.cloud import CloudSection
from rollout.config.settings import ObjectsSection, StorageSection
from rollout.model.errors import (
    ConfigError,
    NotFoundError,
    ObjectCorruptError,
    StateError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
)
from rollout.objects.digest import check_id
from rollout.objects.port import ObjectMeta
from rollout.storage.postgres import CONNECT_TIMEOUT_S, GONE

PART = 256 * 1024
"""Bytes of a row. Fixed, since a range read computes its rows from it."""
COMMAND_TIMEOUT_S = 30.0
"""A server that says nothing for this long is not there: each statement moves one part at most."""
_SPOOL_RAM = 8 << 20
_GUARD = 0x726F626A  # advisory lock of this transaction only: shared to pin, exclusive to delete

_SCHEMA = """
CREATE TABLE IF NOT EXISTS object (object_id bytea PRIMARY KEY, size bigint NOT NULL, created_ms bigint NOT NULL);
CREATE TABLE IF NOT EXISTS object_chunk (
  object_id bytea NOT NULL, idx bigint NOT NULL, data bytea NOT NULL, PRIMARY KEY (object_id, idx));
CREATE TABLE IF NOT EXISTS object_pin (
  object_id bytea NOT NULL, holder text NOT NULL, expires_ms bigint NOT NULL, PRIMARY KEY (object_id, holder));
"""


def open_store(objects: ObjectsSection, storage: StorageSection, cloud: CloudSection) -> PostgresObjectStore:
    if not storage.postgres.url:
        raise ConfigError('[objects] backend = "postgres" needs [storage.postgres] url')
    return PostgresObjectStore(storage.postgres.url, pool_size=storage.postgres.pool_size)


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


@contextmanager
def storage_errors(what: str) -> Generator[None]:
    """Database and network errors as the typed error a caller can act on."""
    try:
        yield
    except asyncpg.DiskFullError as e:
        raise StorageFullError(f"{what}: the database's disk is full; free space, then retry") from e
    except GONE as e:
        raise StorageUnavailableError(f"{what}: the database cannot be reached ({e})") from e
    except asyncpg.PostgresError as e:
        raise StorageError(f"{what}: {e}") from e


class PostgresObjectStore:
    """The tables `object`, `object_chunk` and `object_pin`. Works through a transaction-mode pooler."""

    def __init__(self, url: str, *, pool_size: int = 8, now_ms: Callable[[], int] = wall_ms) -> None:
        self._url = url.replace("postgresql+asyncpg://", "postgresql://", 1)
        self._pool_size = pool_size
        self._now_ms = now_ms
        self._pool: Any = None

    async def open(self) -> None:
        with storage_errors("cannot open the object store"):
            pool = await cast(Any, asyncpg).create_pool(
                self._url,
                min_size=0,
                max_size=self._pool_size,
                statement_cache_size=0,
                timeout=CONNECT_TIMEOUT_S,
                command_timeout=COMMAND_TIMEOUT_S,
            )
            try:
                async with pool.acquire() as db, db.transaction():
                    # Two starts at once would otherwise collide on the catalogue, in spite of IF NOT EXISTS.
                    await db.execute("SELECT pg_advisory_xact_lock($1)", _GUARD + 1)
                    if await db.fetchval("SELECT to_regclass('object_pin')") is None:
                        await db.execute(_SCHEMA)
            except BaseException:
                pool.terminate()
                raise
            self._pool = pool

    async def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()

    def _acquire(self) -> Any:
        if self._pool is None:
            raise StateError("the object store is not open; await open() first")
        return self._pool.acquire()

    async def put(self, object_id: bytes, chunks: AsyncIterator[bytes], size: int) -> bool:
        check_id(object_id)
        with storage_errors(f"object {object_id.hex()[:12]} was not stored"):
            async with self._acquire() as db:
                touched = await db.fetchval(
                    "UPDATE object SET created_ms = $2 WHERE object_id = $1 RETURNING size", object_id, self._now_ms()
                )
            if touched is not None:
                return False
            # Spooled and verified before the database sees a byte: a slow uploader holds no connection.
            with tempfile.SpooledTemporaryFile(max_size=_SPOOL_RAM) as spool:
                await self._spool(spool, object_id, chunks, size)
                return await self._store(spool, object_id, size)

    @staticmethod
    async def _spool(spool: Any, object_id: bytes, chunks: AsyncIterator[bytes], size: int) -> None:
        hasher, written = blake3(), 0

        def write(piece: bytes) -> None:
            hasher.update(piece)
            spool.write(piece)

        async for piece in chunks:
            written += len(piece)
            if written > size:
                break
            await asyncio.to_thread(write, piece)
        if written != size:
            raise ObjectCorruptError(f"the upload said {size} bytes and sent {'more' if written > size else written}")
        if hasher.digest() != object_id:
            raise ObjectCorruptError(
                f"the uploaded bytes hash to {hasher.hexdigest()[:12]}, not to {object_id.hex()[:12]}"
            )

    async def _store(self, spool: Any, object_id: bytes, size: int) -> bool:
        await asyncio.to_thread(spool.seek, 0)
        async with self._acquire() as db, db.transaction():
            made = await db.fetchval(
                "INSERT INTO object (object_id, size, created_ms) VALUES ($1, $2, $3)"
                " ON CONFLICT DO NOTHING RETURNING 1",
                object_id,
                size,
                self._now_ms(),
            )
            if made is None:
                return False
            n = 0
            while piece := await asyncio.to_thread(spool.read, PART):
                await db.execute(
                    "INSERT INTO object_chunk (object_id, idx, data) VALUES ($1, $2, $3)", object_id, n, piece
                )
                n += 1
        return True

    async def get(self, object_id: bytes, offset: int = 0, length: int | None = None) -> AsyncGenerator[bytes]:
        meta = await self.head(object_id)
        if meta is None:
            raise NotFoundError(f"no object {object_id.hex()} in the database")
        end = meta.size if length is None else min(meta.size, offset + length)
        hasher = blake3() if offset == 0 and end == meta.size else None
        at = offset
        while at < end:
            n = at // PART
            with storage_errors(f"object {object_id.hex()[:12]} was not read"):
                async with self._acquire() as db:
                    found = await db.fetchval(
                        "SELECT data FROM object_chunk WHERE object_id = $1 AND idx = $2", object_id, n
                    )
            part = cast("bytes | None", found)
            if part is None:
                raise NotFoundError(f"object {object_id.hex()} was deleted while it was read")
            piece = part[at - n * PART : end - n * PART]
            if not piece:
                raise ObjectCorruptError(f"object {object_id.hex()} has fewer bytes than its size says")
            at += len(piece)
            if hasher is not None:
                hasher.update(piece)
                if at == end and hasher.digest() != object_id:
                    raise ObjectCorruptError(
                        f"object {object_id.hex()} does not match its id; restore it from a backup"
                    )
            yield piece

    async def parts(self, object_id: bytes, parts: Sequence[tuple[int, int]]) -> list[bytes]:
        found: list[bytes] = []
        for offset, length in parts:
            async with aclosing(self.get(object_id, offset, length)) as pieces:
                found.append(b"".join([piece async for piece in pieces]))
        return found

    async def head(self, object_id: bytes) -> ObjectMeta | None:
        with storage_errors("objects cannot be read"):
            async with self._acquire() as db:
                row = await db.fetchrow("SELECT size, created_ms FROM object WHERE object_id = $1", check_id(object_id))
        return None if row is None else ObjectMeta(object_id, row["size"], row["created_ms"])

    async def has(self, object_ids: list[bytes]) -> list[bool]:
        ids = [check_id(i) for i in object_ids]
        with storage_errors("objects cannot be read"):
            async with self._acquire() as db:
                rows = await db.fetch("SELECT object_id FROM object WHERE object_id = ANY($1::bytea[])", ids)
        there = {cast(bytes, row["object_id"]) for row in rows}
        return [i in there for i in ids]

    async def list(self) -> AsyncGenerator[ObjectMeta]:
        after = b""
        while True:
            with storage_errors("objects cannot be listed"):
                async with self._acquire() as db:
                    rows = await db.fetch(
                        "SELECT object_id, size, created_ms FROM object WHERE object_id > $1 ORDER BY 1 LIMIT 1000",
                        after,
                    )
            if not rows:
                return
            for row in rows:
                yield ObjectMeta(row["object_id"], row["size"], row["created_ms"])
            after = rows[-1]["object_id"]

    async def delete(self, object_id: bytes) -> bool:
        """False: it was not there, or somebody has pinned it."""
        with storage_errors(f"object {object_id.hex()[:12]} was not deleted"):
            async with self._acquire() as db, db.transaction():
                await db.execute("SELECT pg_advisory_xact_lock($1)", _GUARD)
                gone = await db.fetchval(
                    "DELETE FROM object o WHERE object_id = $1 AND NOT EXISTS (SELECT 1 FROM object_pin p"
                    " WHERE p.object_id = o.object_id AND p.expires_ms > $2) RETURNING 1",
                    check_id(object_id),
                    self._now_ms(),
                )
                if gone is not None:
                    await db.execute("DELETE FROM object_chunk WHERE object_id = $1", object_id)
        return gone is not None

    async def pin(self, object_ids: list[bytes], holder: str, ttl_s: float) -> None:
        expires = self._now_ms() + int(ttl_s * 1000)
        ids = sorted({check_id(i) for i in object_ids})  # one order for all, or two pinners deadlock
        with storage_errors("objects were not pinned"):
            async with self._acquire() as db, db.transaction():
                await db.execute("SELECT pg_advisory_xact_lock_shared($1)", _GUARD)
                await db.execute(
                    "INSERT INTO object_pin (object_id, holder, expires_ms)"
                    " SELECT i, $2, $3 FROM unnest($1::bytea[]) AS i ON CONFLICT (object_id, holder)"
                    " DO UPDATE SET expires_ms = greatest(object_pin.expires_ms, excluded.expires_ms)",
                    ids,
                    holder,
                    expires,
                )

    async def unpin(self, holder: str, object_ids: list[bytes] | None = None) -> None:
        with storage_errors("objects were not unpinned"):
            async with self._acquire() as db:
                if object_ids is None:
                    query, given = "holder = $1 OR expires_ms <= $2", self._now_ms()
                else:
                    query, given = "holder = $1 AND object_id = ANY($2::bytea[])", object_ids
                await db.execute(f"DELETE FROM object_pin WHERE {query}", holder, given)

    async def pinned(self, object_ids: list[bytes]) -> set[bytes]:
        with storage_errors("objects cannot be read"):
            async with self._acquire() as db:
                rows = await db.fetch(
                    "SELECT DISTINCT object_id FROM object_pin WHERE object_id = ANY($1::bytea[]) AND expires_ms > $2",
                    object_ids,
                    self._now_ms(),
                )
        return {cast(bytes, row["object_id"]) for row in rows}
