"""Converts commit batches from the wire to entries, with every reference resolved."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from rollout.model.counts import counted
from rollout.model.errors import NotFoundError, ProtocolError
from rollout.model.item import Blob, ObjectSlice, Outcome
from rollout.wire.codec import failures_from_wire, split_ids, unpack_blobs
from rollout.wire.v1 import runs_pb2 as pb
from rollout.workloads.commit import CommitEntry

Read = Callable[[bytes, int, int], Awaitable[bytes]]
"""(object id, offset, length) -> bytes"""

_SPAN_MAX = 32 << 20
_READS = 8


async def entries_of(batch: pb.CommitBatch, read: Read) -> list[CommitEntry]:
    """Return the entries. Raises ProtocolError if the columns disagree, NotFoundError if an object is gone."""
    count = len(batch.seq)
    data = unpack_blobs(batch.length, batch.data, batch.refs)
    with_payloads = bool(batch.ids)
    payloads: list[Blob] = [b""] * count
    ids = [b""] * count
    if with_payloads:
        payloads = unpack_blobs(batch.payload_length, batch.payload_data, batch.payload_refs)
        ids = split_ids(batch.ids)
    columns = (
        batch.attempt,
        batch.outcome,
        data,
        batch.duration_ms,
        batch.accepted_ms,
        batch.worker_index,
        payloads,
        ids,
    )
    if any(len(column) != count for column in columns):
        raise ProtocolError("the columns of a commit batch differ in length")
    tries = batch.tries or batch.attempt
    if len(tries) != count:
        raise ProtocolError("the columns of a commit batch differ in length")
    failures = failures_from_wire(batch.errors)
    try:
        found = await resolved([*data, *payloads], read)
    except NotFoundError as error:
        raise _gone(error, batch, data, payloads) from error
    return [
        CommitEntry(
            position=batch.from_cursor + index,
            seq=batch.seq[index],
            attempt=batch.attempt[index],
            outcome=Outcome(batch.outcome[index]),
            data=found[index],
            payload=found[count + index],
            id=ids[index],
            failure=failures.get(index),
            duration_ms=batch.duration_ms[index],
            accepted_ms=batch.accepted_ms[index],
            worker=batch.workers[batch.worker_index[index]],
            units_in=batch.units_in[index] if batch.units_in else 0,
            units_out=batch.units_out[index] if batch.units_out else 0,
            tries=tries[index],
        )
        for index in range(count)
    ]


def _gone(error: NotFoundError, batch: pb.CommitBatch, data: Sequence[Blob], payloads: Sequence[Blob]) -> NotFoundError:
    """Return `error` extended by what was in the object that it names."""
    rows = [
        seq + 1
        for seq, *blobs in zip(batch.seq, data, payloads, strict=True)
        if any(isinstance(blob, ObjectSlice) and blob.object_id.hex() in error.message for blob in blobs)
    ]
    first = f" (the first is row {min(rows)})" if rows else ""
    return NotFoundError(
        f"{error.message}: {counted(len(rows), 'row')} of the run are in it{first}, and nothing of Rollout deletes "
        "what a run refers to. Put it back under its key, from a backup or an older version, and give the command "
        "again"
    )


async def resolved(blobs: Sequence[Blob], read: Read) -> list[bytes]:
    """Return the bytes of each. Raises NotFoundError if an object is gone."""
    spans: dict[bytes, tuple[int, int]] = {}
    for blob in blobs:
        if isinstance(blob, ObjectSlice):
            low, high = spans.get(blob.object_id, (blob.offset, blob.offset))
            spans[blob.object_id] = (min(low, blob.offset), max(high, blob.offset + blob.length))
    if not spans:
        return [blob for blob in blobs if isinstance(blob, bytes)]
    slots = asyncio.Semaphore(_READS)

    async def one(object_id: bytes, offset: int, length: int) -> bytes:
        async with slots:
            return await read(object_id, offset, length)

    # Neighbours in a pack are read in one go, unless too far apart.
    together = {key: (low, high) for key, (low, high) in spans.items() if high - low <= _SPAN_MAX}
    parts = await asyncio.gather(*(one(key, low, high - low) for key, (low, high) in together.items()))
    packs = dict(zip(together, parts, strict=True))
    found: list[bytes] = []
    for blob in blobs:
        if isinstance(blob, bytes):
            found.append(blob)
        elif (pack := packs.get(blob.object_id)) is not None:
            start = blob.offset - together[blob.object_id][0]
            found.append(pack[start : start + blob.length])
        else:
            found.append(await one(*blob))
    return found
