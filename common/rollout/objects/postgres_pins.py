"""Pins in Postgres, for objects that are rows there and for objects in a bucket (see `claims`)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import asyncpg

from rollout.model.errors import StateError, StorageError, StorageFullError, StorageUnavailableError
from rollout.objects.claims import CLAIM_S, TOUCHES_KEPT_S, new_owner
from rollout.objects.digest import check_id
from rollout.objects.fs import wall_ms
from rollout.storage.postgres import CONNECT_TIMEOUT_S, GONE

COMMAND_TIMEOUT_S = 30.0
"""Seconds without an answer after which the server counts as gone; a statement moves one part at most."""
GUARD = 0x726F626A
"""Advisory lock of a transaction: shared to pin, exclusive to delete."""
_POLL_S = 0.05

PIN_SCHEMA = """
CREATE TABLE IF NOT EXISTS object_pin (
  object_id bytea NOT NULL, holder text NOT NULL, expires_ms bigint NOT NULL, PRIMARY KEY (object_id, holder));
"""
_CLAIM_SCHEMA = """
CREATE TABLE IF NOT EXISTS object_claim (
  object_id bytea PRIMARY KEY, owner text NOT NULL, expires_at timestamptz NOT NULL);
CREATE TABLE IF NOT EXISTS object_touch (object_id bytea PRIMARY KEY, at_ms bigint NOT NULL);
"""
_CLAIMED = "SELECT object_id FROM object_claim WHERE object_id = ANY($1::bytea[]) AND expires_at > clock_timestamp()"
_UNPINNED_CLAIM = """
INSERT INTO object_claim (object_id, owner, expires_at)
 SELECT $1, $2, clock_timestamp() + make_interval(secs => $3)
  WHERE NOT EXISTS (SELECT 1 FROM object_pin WHERE object_id = $1 AND expires_ms > $4)
 ON CONFLICT (object_id) DO UPDATE SET owner = excluded.owner, expires_at = excluded.expires_at
  WHERE object_claim.expires_at <= clock_timestamp()
 RETURNING 1
"""


@contextmanager
def storage_errors(what: str) -> Generator[None]:
    """Translate database and network errors to the typed error that a caller can act on."""
    try:
        yield
    except asyncpg.DiskFullError as e:
        raise StorageFullError(f"{what}: the database's disk is full; free space, then retry") from e
    except GONE as e:
        raise StorageUnavailableError(f"{what}: the database cannot be reached ({e})") from e
    except asyncpg.PostgresError as e:
        raise StorageError(f"{what}: {e}") from e


async def open_pool(url: str, pool_size: int, table: str, schema: str) -> Any:
    """Open a pool, and create `schema` if `table` is missing. It works through a transaction-mode pooler."""
    pool = await cast(Any, asyncpg).create_pool(
        url.replace("postgresql+asyncpg://", "postgresql://", 1),
        min_size=0,
        max_size=pool_size,
        statement_cache_size=0,
        timeout=CONNECT_TIMEOUT_S,
        command_timeout=COMMAND_TIMEOUT_S,
    )
    try:
        async with pool.acquire() as db, db.transaction():
            # Two starts at once would otherwise collide on the catalogue, in spite of IF NOT EXISTS.
            await db.execute("SELECT pg_advisory_xact_lock($1)", GUARD + 1)
            if await db.fetchval("SELECT to_regclass($1)", table) is None:
                await db.execute(schema)
    except BaseException:
        pool.terminate()
        raise
    return pool


async def add_pins(db: Any, object_ids: list[bytes], holder: str, expires_ms: int) -> None:
    """Add pins within a transaction that holds the guard, in the order of ids, because two pinners could deadlock
    otherwise."""
    await db.execute(
        "INSERT INTO object_pin (object_id, holder, expires_ms)"
        " SELECT i, $2, $3 FROM unnest($1::bytea[]) AS i ON CONFLICT (object_id, holder)"
        " DO UPDATE SET expires_ms = greatest(object_pin.expires_ms, excluded.expires_ms)",
        sorted(set(object_ids)),
        holder,
        expires_ms,
    )


class Pooled:
    """Base of what keeps pins, with a pool of connections between `open` and `close`."""

    def __init__(self, url: str, *, pool_size: int = 8, now_ms: Callable[[], int] = wall_ms) -> None:
        self._url = url
        self._pool_size = pool_size
        self._now_ms = now_ms
        self._pool: Any = None

    async def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()

    def _acquire(self) -> Any:
        if self._pool is None:
            raise StateError("the object store is not open; await open() first")
        return self._pool.acquire()

    async def unpin(self, holder: str, object_ids: list[bytes] | None = None) -> None:
        which, given = (
            ("expires_ms <= $2 OR holder = $1", self._now_ms())
            if object_ids is None
            else ("holder = $1 AND object_id = ANY($2::bytea[])", object_ids)
        )
        with storage_errors("objects were not unpinned"):
            async with self._acquire() as db:
                await db.execute(f"DELETE FROM object_pin WHERE {which}", holder, given)

    async def pinned(self, object_ids: list[bytes]) -> set[bytes]:
        query = "SELECT DISTINCT object_id FROM object_pin WHERE object_id = ANY($1::bytea[]) AND expires_ms > $2"
        with storage_errors("pins cannot be read"):
            async with self._acquire() as db:
                rows = await db.fetch(query, object_ids, self._now_ms())
        return {cast(bytes, row["object_id"]) for row in rows}


class PostgresPins(Pooled):
    """`claims.Pins` in Postgres. Claims use the database's clock, because hosts may differ."""

    def __init__(
        self, url: str, *, pool_size: int = 8, now_ms: Callable[[], int] = wall_ms, claim_s: float = CLAIM_S
    ) -> None:
        super().__init__(url, pool_size=pool_size, now_ms=now_ms)
        self._claim_s = claim_s

    async def open(self) -> None:
        with storage_errors("cannot open the pins of the object store"):
            self._pool = await open_pool(self._url, self._pool_size, "object_touch", PIN_SCHEMA + _CLAIM_SCHEMA)
            async with self._acquire() as db:
                oldest = self._now_ms() - TOUCHES_KEPT_S * 1000
                await db.execute("DELETE FROM object_touch WHERE at_ms < $1", oldest)

    async def pin(self, object_ids: list[bytes], holder: str, ttl_s: float) -> None:
        ids = [check_id(i) for i in object_ids]
        with storage_errors("objects were not pinned"):
            while ids := await self._try_pin(ids, holder, ttl_s):
                await _pause()

    async def _try_pin(self, ids: list[bytes], holder: str, ttl_s: float) -> list[bytes]:
        """Return the objects that could not be pinned because they are being deleted."""
        async with self._acquire() as db, db.transaction():
            await db.execute("SELECT pg_advisory_xact_lock_shared($1)", GUARD)
            claimed = {cast(bytes, row["object_id"]) for row in await db.fetch(_CLAIMED, ids)}
            free = [i for i in ids if i not in claimed]
            await add_pins(db, free, holder, self._now_ms() + int(ttl_s * 1000))
        return [i for i in ids if i in claimed]

    async def claim(self, object_id: bytes) -> str:
        owner = new_owner()
        with storage_errors("an object was not deleted"):
            async with self._acquire() as db, db.transaction():
                await db.execute("SELECT pg_advisory_xact_lock($1)", GUARD)
                made = await db.fetchval(_UNPINNED_CLAIM, object_id, owner, self._claim_s, self._now_ms())
        return owner if made else ""

    async def release(self, object_id: bytes, owner: str) -> None:
        with storage_errors("the deletion of an object was not noted"):
            async with self._acquire() as db:
                await db.execute("DELETE FROM object_claim WHERE object_id = $1 AND owner = $2", object_id, owner)

    async def settled(self, object_id: bytes) -> bool:
        waited = False
        with storage_errors("pins cannot be read"):
            while True:
                async with self._acquire() as db:
                    if not await db.fetchval(_CLAIMED, [object_id]):
                        return waited
                waited = True
                await _pause()

    async def touch(self, object_id: bytes) -> None:
        with storage_errors("an object was not kept"):
            async with self._acquire() as db:
                await db.execute(
                    "INSERT INTO object_touch VALUES ($1, $2)"
                    " ON CONFLICT (object_id) DO UPDATE SET at_ms = excluded.at_ms",
                    object_id,
                    self._now_ms(),
                )

    async def touched(self, object_ids: list[bytes]) -> dict[bytes, int]:
        with storage_errors("pins cannot be read"):
            async with self._acquire() as db:
                rows = await db.fetch(
                    "SELECT object_id, at_ms FROM object_touch WHERE object_id = ANY($1::bytea[])", object_ids
                )
        return {cast(bytes, row["object_id"]): cast(int, row["at_ms"]) for row in rows}


async def _pause() -> None:
    await asyncio.sleep(_POLL_S * random.uniform(0.5, 1.5))
