"""Frees objects that results named and that were released, soon after rather than at garbage collection."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable

from rollout.objects.port import ObjectStore

from rollout_coordinator.ledger.ledger import Ledger
from rollout_coordinator.ledger.port import LetGoRow

_BATCH = 500
SETTLE_S = 0.5
"""Delay after a worker's pin ends before references are checked: that worker may have just stored the object again,
which the ledger does not know yet."""


async def free_let_go(
    store: ObjectStore, ledger: Ledger, epoch: int, forget: Callable[[Iterable[bytes]], None]
) -> set[bytes]:
    """Delete every released object that nothing else refers to and that is not pinned, and return the deleted ones.

    The worker's pin held the object until the ledger named it. Remaining objects are left to garbage collection. Raises
    FencedError if `epoch` is over, or StorageError.
    """
    deleted: set[bytes] = set()
    while rows := await ledger.to_free(_BATCH):
        await _unpin(store, rows)
        await asyncio.sleep(SETTLE_S)
        gone = await free_loose(store, ledger, {row.object_id for row in rows}, forget)
        await ledger.freed(epoch, rows)
        deleted |= gone
    return deleted


async def free_loose(
    store: ObjectStore, ledger: Ledger, object_ids: set[bytes], forget: Callable[[Iterable[bytes]], None]
) -> set[bytes]:
    """Delete those that nobody pins and nothing refers to, and return them. Raises StorageError."""
    loose = object_ids - await store.pinned(sorted(object_ids)) if object_ids else object_ids
    loose -= await ledger.referenced(sorted(loose)) if loose else set()
    try:
        return {object_id for object_id in sorted(loose) if await store.delete(object_id)}
    finally:  # also of a deletion that fails the object may be gone
        forget(loose)


async def _unpin(store: ObjectStore, rows: list[LetGoRow]) -> None:
    stored: dict[str, list[bytes]] = defaultdict(list)
    for row in rows:
        stored[row.worker].append(row.object_id)
    for worker, ids in stored.items():
        await store.unpin(worker, ids)
