"""Packs items into frames: many items each, below the frame limit, with large payloads as slices of packed objects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass

from rollout.model.item import INLINE_MAX, NewItem
from rollout.objects.pack import Packer
from rollout.wire.codec import item_batch_to_wire
from rollout.wire.v1 import common_pb2 as common

ITEMS_MAX = 512
INLINE_BYTES_MAX = 448 << 10  # a frame is 1 MiB at most; the rest is ids, lengths, specs
RAW_BYTES_MAX = 8 << 20  # of payloads in memory per batch
_AHEAD = 4  # batches packed while others wait for their acknowledgement
_PER_ITEM = 48


@dataclass(slots=True)
class Batch:
    """Items [first, end) of the run in one frame."""

    first: int
    end: int
    message: common.ItemBatch
    sent_ns: int = 0
    """Unix time of the first sending."""


async def batches(items: Iterator[NewItem | None], first: int, packer: Packer) -> AsyncGenerator[Batch, None]:
    """Yield frames of `items`, the first of which has seq `first`; None among them ends a frame.

    Raises what `items` raises.
    """
    ready: asyncio.Queue[asyncio.Task[Batch] | None] = asyncio.Queue(_AHEAD)

    async def produce() -> None:
        seq = first
        # In a thread: the iterator reads files and hashes, for milliseconds at a time.
        while part := await asyncio.to_thread(_take, items):
            await ready.put(asyncio.create_task(_packed(seq, part, packer)))
            seq += len(part)
        await ready.put(None)

    producer = asyncio.create_task(produce())
    pending: asyncio.Task[Batch] | None = None
    try:
        while True:
            waiting = asyncio.create_task(ready.get())
            await asyncio.wait({waiting, producer}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done() and producer.done() and producer.exception() is not None:
                waiting.cancel()
                await producer
            pending = await waiting
            if pending is None:
                return
            yield await pending
    finally:
        producer.cancel()
        left = [task for task in [pending, *(ready.get_nowait() for _ in range(ready.qsize()))] if task is not None]
        for task in left:
            task.cancel()
        await asyncio.gather(producer, *left, return_exceptions=True)


_END = NewItem(b"", b"")


def _take(items: Iterator[NewItem | None]) -> list[NewItem]:
    part: list[NewItem] = []
    inline = raw = 0
    # One item may pass each bound by its own size: that keeps the frame below 1 MiB, since inline is at most 4 KiB.
    while len(part) < ITEMS_MAX and inline < INLINE_BYTES_MAX and raw < RAW_BYTES_MAX:
        item = next(items, _END)
        if item is _END or (item is None and part):
            break
        if item is None:
            continue
        size = len(item.payload) if isinstance(item.payload, bytes) else 0
        raw += size
        inline += _PER_ITEM + (size if size <= INLINE_MAX else 0)
        part.append(item)
    return part


async def _packed(first: int, part: list[NewItem], packer: Packer) -> Batch:
    stored = await packer.store_many([item.payload for item in part])
    for item, payload in zip(part, stored, strict=True):
        item.payload = payload
    return Batch(first, first + len(part), item_batch_to_wire(first, part))
