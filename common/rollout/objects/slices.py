"""Slices of packs: read singly if a host needs few of a pack, with the whole pack if it needs many.

Rows of a pack go to every worker that has room. When each host fetched a whole pack for any row of it, 40 hosts fetched
25 times the data (ADR 0015).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

from rollout.model.errors import ObjectCorruptError
from rollout.model.item import Blob, ObjectSlice
from rollout.objects.cache import ObjectCache

Read = Callable[[bytes, Sequence[tuple[int, int]]], Awaitable[list[bytes]]]
"""Function from an object id and parts by (offset, length) to the bytes of each."""

ALONE_MAX = 256 << 10
"""Maximum bytes of a slice that is read singly; it stays in memory until its attempt has a process."""
RENT_BYTES = 1 << 20
"""Bytes of one object read by slices before it is fetched whole.

It is an eighth of a pack, so that a host reads at most an eighth more than the pack. If more than eight hosts share a
pack, each reads only what it is given.
"""
GAP_BYTES = 16 << 10
"""Maximum gap in bytes between slices that are read as one part; another part costs about as much."""
_REMEMBERED = 4096
_READS = 8


class SliceReader:
    """Reads slices. `read` is `RemoteObjects.read` or the like."""

    def __init__(self, cache: ObjectCache, read: Read) -> None:
        self._cache = cache
        self._read = read
        self._rented: OrderedDict[bytes, int] = OrderedDict()
        self._slots = asyncio.Semaphore(_READS)

    async def take(self, object_id: bytes, slices: Sequence[ObjectSlice]) -> list[Blob]:
        """Return the bytes of slices of one object, or the slices themselves if the object is in the cache for their
        reader.

        Raises NotFoundError, ObjectCorruptError, UnavailableError, StorageError.
        """
        if await self._worth_whole(object_id, slices):
            await self._cache.ready(object_id, max(s.offset + s.length for s in slices))
            return list(slices)
        spans = _spans(slices)
        async with self._slots:
            parts = await self._read(object_id, [(low, high - low) for low, high in spans])
        if any(len(part) != high - low for part, (low, high) in zip(parts, spans, strict=True)):
            raise ObjectCorruptError(f"object {object_id.hex()} is shorter than the slice that refers to it")
        found: list[Blob] = []
        for one in slices:
            at = next(n for n, (low, high) in enumerate(spans) if low <= one.offset and one.offset + one.length <= high)
            start = one.offset - spans[at][0]
            found.append(parts[at][start : start + one.length])
        return found

    async def read(self, blob: Blob) -> bytes:
        """Return the bytes of a blob that is needed here. Raises the errors of `take`."""
        if isinstance(blob, bytes):
            return blob
        (found,) = await self.take(blob.object_id, [blob])
        return await self._cache.read(found)

    async def _worth_whole(self, object_id: bytes, slices: Sequence[ObjectSlice]) -> bool:
        if any(one.length > ALONE_MAX for one in slices):
            return True
        rented = self._rented.pop(object_id, 0) + sum(one.length for one in slices)
        if rented > RENT_BYTES:
            return True
        self._rented[object_id] = rented
        if len(self._rented) > _REMEMBERED:
            self._rented.popitem(last=False)
        return await self._cache.has(object_id)


def _spans(slices: Sequence[ObjectSlice]) -> list[tuple[int, int]]:
    """Return the spans [low, high) of the reads that together cover the slices."""
    spans: list[tuple[int, int]] = []
    for low, high in sorted((one.offset, one.offset + one.length) for one in slices):
        if spans and low - spans[-1][1] <= GAP_BYTES:
            spans[-1] = spans[-1][0], max(spans[-1][1], high)
        else:
            spans.append((low, high))
    return spans
