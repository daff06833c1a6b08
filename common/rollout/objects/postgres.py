"""Objects as rows: chunks in the database, so that a standby needs nothing else."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, cast

from blake3 import blake3

from rollout.config.cloud import CloudSection
from rollout.config.settings import ObjectsSection, StorageSection
from rollout.model.errors import ConfigError, NotFoundError, ObjectCorruptError
from rollout.objects.digest import check_id, spool
from rollout.objects.port import ObjectMeta
from rollout.objects.postgres_pins import GUARD, PIN_SCHEMA, Pooled, add_pins, open_pool, storage_errors

PART = 256 * 1024
"""Bytes of a row. The size is fixed because a range read computes its rows from it."""
_SPOOL_RAM = 8 << 20

_SCHEMA = """
CREATE TABLE IF NOT EXISTS object (object_id bytea PRIMARY KEY, size bigint NOT NULL, created_ms bigint NOT NULL);
CREATE TABLE IF NOT EXISTS object_chunk (
  object_id bytea NOT NULL, idx bigint NOT NULL, data bytea NOT NULL, PRIMARY KEY (object_id, idx));
"""


def open_store(objects: ObjectsSection, storage: StorageSection, cloud: CloudSection) -> PostgresObjectStore:
    if not storage.postgres.url:
        raise ConfigError('[objects] backend = "postgres" needs [storage.postgres] url')
    return PostgresObjectStore(storage.postgres.url, pool_size=storage.postgres.pool_size)


class PostgresObjectStore(Pooled):
    """Store in the tables `object`, `object_chunk` and `object_pin`. It works through a transaction-mode pooler."""

    async def open(self) -> None:
        with storage_errors("cannot open the object store"):
            self._pool = await open_pool(self._url, self._pool_size, "object", _SCHEMA + PIN_SCHEMA)

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
            with tempfile.SpooledTemporaryFile(max_size=_SPOOL_RAM) as file:
                await spool(file, object_id, chunks, size)
                return await self._store(file, object_id, size)

    async def _store(self, file: Any, object_id: bytes, size: int) -> bool:
        await asyncio.to_thread(file.seek, 0)
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
            while piece := await asyncio.to_thread(file.read, PART):
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
        """Delete the object. Returns False if it was absent or is pinned."""
        with storage_errors(f"object {object_id.hex()[:12]} was not deleted"):
            async with self._acquire() as db, db.transaction():
                await db.execute("SELECT pg_advisory_xact_lock($1)", GUARD)
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
        ids = [check_id(i) for i in object_ids]
        with storage_errors("objects were not pinned"):
            async with self._acquire() as db, db.transaction():
                await db.execute("SELECT pg_advisory_xact_lock_shared($1)", GUARD)
                await add_pins(db, ids, holder, self._now_ms() + int(ttl_s * 1000))
