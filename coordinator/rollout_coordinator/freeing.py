"""Objects that results named and that were let go: freed soon after, and not only when garbage is collected."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable

from rollout.objects.port import ObjectStore

from rollout_coordinator.ledger.ledger import Ledger
from rollout_coordinator.ledger.port import LetGoRow

_BATCH = 500
SETTLE_S = 0.5
"""Between the end of a worker's pin and the look at who needs the object: that worker may have just stored it again,
which the ledger does not know yet."""


async def free_let_go(
    store: ObjectStore, ledger: Ledger, epoch: int, forget: Callable[[Iterable[bytes]], None]
) -> set[bytes]:
    """Delete every object that was let go, unless something else refers to it or it is pinned: the deleted ones.

    The pin with which its worker stored it held it until the ledger named it, and is over. Those that stay are left to
    the collection of garbage. FencedError: `epoch` is over. StorageError.
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
    """Delete those that nobody pins and that nothing refers to: the deleted ones. StorageError."""
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
