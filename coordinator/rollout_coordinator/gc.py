"""Deletes objects that nothing refers to."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import structlog
from rollout.model.errors import StorageError
from rollout.objects.port import ObjectMeta, ObjectStore

log = structlog.get_logger()

_BATCH = 1000
_FAILURES_MAX = 3
"""Consecutive failures after which collection stops: the store is unavailable, and each further one would take time."""


class References(Protocol):
    """The part of the ledger that collection needs."""

    async def referenced(self, object_ids: list[bytes]) -> set[bytes]: ...


@dataclass(frozen=True, slots=True)
class Collected:
    objects: int = 0
    bytes: int = 0
    kept: int = 0


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


async def collect_garbage(
    store: ObjectStore,
    ledger: References,
    grace_s: float,
    *,
    now_ms: Callable[[], int] = wall_ms,
    forget: Callable[[list[bytes]], None] = lambda object_ids: None,
) -> Collected:
    """Delete objects older than `grace_s` seconds that no payload or result refers to and nobody pins.

    This is safe during uploads and submits. An object is pinned before its first byte, so one that is neither pinned
    nor then referred to is free; the order matters, because a pin is dropped only after the reference is in the ledger.
    A pin that comes after the check makes the store refuse the deletion. A failure does not stop others: the next
    collection tries again. `forget` is told what may be gone, so that nobody relies on it.
    """
    freed = freed_bytes = kept = failures = 0
    oldest = now_ms() - int(grace_s * 1000)

    async def sweep(batch: list[ObjectMeta]) -> None:
        nonlocal freed, freed_bytes, kept, failures
        pinned = await store.pinned([m.object_id for m in batch])
        loose = [m for m in batch if m.object_id not in pinned]
        referenced = await ledger.referenced([m.object_id for m in loose]) if loose else set[bytes]()
        for meta in loose:
            if meta.object_id in referenced:
                continue
            try:
                if await store.delete(meta.object_id):
                    freed += 1
                    freed_bytes += meta.size
                failures = 0
            except StorageError as error:
                failures += 1
                if failures == _FAILURES_MAX:
                    raise
                log.warning("object_not_freed", object_id=meta.object_id.hex(), error=str(error))
            finally:  # what was begun may be done, whatever its answer
                forget([meta.object_id])
        kept += len(batch)

    batch: list[ObjectMeta] = []
    async with aclosing(store.list()) as metas:
        async for meta in metas:
            if meta.created_ms > oldest:
                kept += 1
                continue
            batch.append(meta)
            if len(batch) >= _BATCH:
                await sweep(batch)
                batch = []
    if batch:
        await sweep(batch)
    done = Collected(freed, freed_bytes, kept - freed)
    log.info("objects_collected", objects=done.objects, bytes=done.bytes, kept=done.kept)
    return done
