"""Pins of a store without locks, that is, a bucket. Pins and running deletions live in a database.

Deleting an object is a call over the network, which no transaction can span. It is therefore recorded first, as a
claim: claimed, deleted, released. A claim is refused if somebody pins the object. A pin that meets a claim waits until
it is released, and then checks whether the object exists. The claim of a dead process expires, long after the call it
was made for.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ulid import ULID

from rollout.model.errors import StateError
from rollout.objects.digest import check_id
from rollout.objects.fs import make_directory, storage_errors, wall_ms
from rollout.objects.pins import PinTable

CLAIM_S = 180.0
"""Lifetime of a claim in seconds; twice the time limit of its deletion."""
TOUCHES_KEPT_S = 30 * 86_400
"""Seconds that a repeated put is remembered; after this time the object counts as old in any case."""
_POLL_S = 0.05

_SCHEMA = """
CREATE TABLE IF NOT EXISTS deletion (
  object_id BLOB PRIMARY KEY, owner TEXT NOT NULL, boot TEXT NOT NULL, expires_ms INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS touch (object_id BLOB PRIMARY KEY, at_ms INTEGER NOT NULL) WITHOUT ROWID;
"""


class Pins(Protocol):
    """Pins of one bucket, shared by all processes that use its objects."""

    async def open(self) -> None: ...
    async def close(self) -> None: ...
    async def pin(self, object_ids: list[bytes], holder: str, ttl_s: float) -> None:
        """Pin the objects. Waits for the end of running deletions, and for nothing else."""
        ...

    async def unpin(self, holder: str, object_ids: list[bytes] | None = None) -> None: ...
    async def pinned(self, object_ids: list[bytes]) -> set[bytes]: ...

    async def claim(self, object_id: bytes) -> str:
        """Return the claim's owner, for `release`, or an empty string if somebody pins or deletes the object."""
        ...

    async def release(self, object_id: bytes, owner: str) -> None:
        """Release the claim, unless it has another owner by now."""
        ...

    async def settled(self, object_id: bytes) -> bool:
        """Wait until nobody deletes the object. Returns whether somebody did."""
        ...

    async def touch(self, object_id: bytes) -> None:
        """Record that the object was put again: its grace period before collection restarts."""
        ...

    async def touched(self, object_ids: list[bytes]) -> dict[bytes, int]:
        """Return the time (Unix ms) of the last put, for those objects that were put again."""
        ...


def boot_ms() -> int:
    """Return the milliseconds since this machine booted, including sleep. Unlike the wall clock, nobody sets this
    clock."""
    return time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)) // 1_000_000


def boot_id() -> str:
    """Return an id that changes at each boot of this machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def new_owner() -> str:
    return str(ULID())


async def until(test: Callable[[], bool]) -> bool:
    """Poll `test` in a thread until it holds, because another process acts. Returns whether it had to wait."""
    waited = False
    while True:
        if await asyncio.to_thread(test):
            return waited
        waited = True
        await asyncio.sleep(_POLL_S * random.uniform(0.5, 1.5))


class ClaimTable(PinTable):
    """Pins and claims in one SQLite file beside the ledger. Blocking.

    All its processes are on one host. Claims use its boot clock: a reboot ends whoever made one.
    """

    def __init__(self, path: Path, *, now_ms: Callable[[], int], claim_s: float) -> None:
        super().__init__(path, shared=False, now_ms=now_ms)
        self._claim_ms = int(claim_s * 1000)
        self._boot = boot_id()
        self._db.executescript(_SCHEMA)
        with self.exclusive():
            self._db.execute("DELETE FROM touch WHERE at_ms < ?", (now_ms() - TOUCHES_KEPT_S * 1000,))

    def try_pin(self, object_ids: list[bytes], holder: str, ttl_s: float) -> list[bytes]:
        """Return the objects that could not be pinned because they are being deleted."""
        with self.exclusive():
            claimed = self._claimed(object_ids)
            self.add_pins([i for i in object_ids if i not in claimed], holder, ttl_s)
        return [i for i in object_ids if i in claimed]

    def claimed(self, object_id: bytes) -> bool:
        with self._lock:
            return bool(self._claimed([object_id]))

    def _claimed(self, object_ids: list[bytes]) -> set[bytes]:
        live = self._db.execute(
            "SELECT object_id FROM deletion WHERE boot = ? AND expires_ms > ?", (self._boot, boot_ms())
        )
        return {row[0] for row in live}.intersection(object_ids)

    def claim(self, object_id: bytes) -> str:
        owner = new_owner()
        with self.exclusive():
            if self._pinned([object_id]) or self._claimed([object_id]):
                return ""
            now = boot_ms()
            self._db.execute("DELETE FROM deletion WHERE boot != ? OR expires_ms <= ?", (self._boot, now))
            row = (object_id, owner, self._boot, now + self._claim_ms)
            self._db.execute("INSERT INTO deletion VALUES (?, ?, ?, ?)", row)
        return owner

    def release(self, object_id: bytes, owner: str) -> None:
        with self.exclusive():
            self._db.execute("DELETE FROM deletion WHERE object_id = ? AND owner = ?", (object_id, owner))

    def touch(self, object_id: bytes) -> None:
        with self.exclusive():
            self._db.execute("INSERT OR REPLACE INTO touch VALUES (?, ?)", (object_id, self._now_ms()))

    def touched(self, object_ids: list[bytes]) -> dict[bytes, int]:
        found: dict[bytes, int] = {}
        with self._lock:
            for start in range(0, len(object_ids), 500):
                part = object_ids[start : start + 500]
                marks = ",".join("?" * len(part))
                found.update(self._db.execute(f"SELECT object_id, at_ms FROM touch WHERE object_id IN ({marks})", part))
        return found


class FilePins:
    """`Pins` in a SQLite file."""

    def __init__(self, path: Path, *, now_ms: Callable[[], int] = wall_ms, claim_s: float = CLAIM_S) -> None:
        self._path = path
        self._now_ms = now_ms
        self._claim_s = claim_s
        self._found: ClaimTable | None = None

    def _open(self) -> ClaimTable:
        make_directory(self._path.parent, "[storage.embedded] path")
        with storage_errors(f"cannot use {self._path}"):
            return ClaimTable(self._path, now_ms=self._now_ms, claim_s=self._claim_s)

    async def open(self) -> None:
        self._found = await asyncio.to_thread(self._open)

    async def close(self) -> None:
        table, self._found = self._found, None
        if table is not None:
            await asyncio.to_thread(table.close)

    @property
    def _table(self) -> ClaimTable:
        if self._found is None:
            raise StateError("the object store is not open; await open() first")
        return self._found

    async def pin(self, object_ids: list[bytes], holder: str, ttl_s: float) -> None:
        left = [check_id(i) for i in object_ids]

        def all_pinned() -> bool:
            nonlocal left
            left = self._table.try_pin(left, holder, ttl_s)
            return not left

        with storage_errors("objects were not pinned"):
            await until(all_pinned)

    async def unpin(self, holder: str, object_ids: list[bytes] | None = None) -> None:
        with storage_errors("objects were not unpinned"):
            await asyncio.to_thread(self._table.unpin, holder, object_ids)

    async def pinned(self, object_ids: list[bytes]) -> set[bytes]:
        with storage_errors("pins cannot be read"):
            return await asyncio.to_thread(self._table.pinned, object_ids)

    async def claim(self, object_id: bytes) -> str:
        with storage_errors("an object was not deleted"):
            return await asyncio.to_thread(self._table.claim, object_id)

    async def release(self, object_id: bytes, owner: str) -> None:
        with storage_errors("the deletion of an object was not noted"):
            await asyncio.to_thread(self._table.release, object_id, owner)

    async def settled(self, object_id: bytes) -> bool:
        with storage_errors("pins cannot be read"):
            return await until(lambda: not self._table.claimed(object_id))

    async def touch(self, object_id: bytes) -> None:
        with storage_errors("an object was not kept"):
            await asyncio.to_thread(self._table.touch, object_id)

    async def touched(self, object_ids: list[bytes]) -> dict[bytes, int]:
        with storage_errors("pins cannot be read"):
            return await asyncio.to_thread(self._table.touched, object_ids)
