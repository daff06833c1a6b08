"""Converts views of runs and workers, and pages of the commit log, to wire messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar, cast

from google.protobuf.message import Message
from rollout.model.errors import InputError
from rollout.model.item import Blob, ObjectSlice
from rollout.wire.codec import failure_to_wire, inventory_to_wire, pack_blobs, run_spec_to_wire
from rollout.wire.v1 import common_pb2, runs_pb2

from rollout_coordinator.core.step import WorkerRow
from rollout_coordinator.core.views import CauseView, RunView, WorkerView
from rollout_coordinator.ledger.port import CommitPage

M = TypeVar("M", bound=Message)

PAYLOAD_MAX = 64 << 10
CONFIG_MAX = 512 << 10
FRAME_BYTES = 900 << 10  # below the wire limit of 1 MiB, with room for what is not counted
ROW_BYTES = 96  # of a commit log entry besides its inline bytes


def filled(kind: type[M], view: Any, **others: Any) -> M:
    """Make a message from the fields of a dataclass with the same names; `others` take precedence."""
    return kind(**({name: getattr(view, name) for name in _shared(kind, view.__class__)} | others))


@cache
def _shared(kind: type[Message], view: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(view) if field.name in kind.DESCRIPTOR.fields_by_name)


def status_to_wire(view: RunView) -> runs_pb2.RunStatus:
    status = filled(
        runs_pb2.RunStatus,
        view,
        spec=run_spec_to_wire(view.spec),
        state=str(view.state),
        survivors=[
            common_pb2.AttemptKeys(log=log, seq=[seq], attempt=[attempt]) for log, seq, attempt, _ in view.survivors
        ],
        lanes=[
            filled(runs_pb2.LaneStatus, lane, pruned=lane.pruned_at >= 0, pruned_at=max(lane.pruned_at, 0))
            for lane in view.lanes
        ],
        causes=map(cause_to_wire, view.causes),
        waits=[filled(runs_pb2.Wait, wait) for wait in view.waits],
    )
    status.spec.priority = view.priority
    return status


def cause_to_wire(view: CauseView) -> runs_pb2.Cause:
    return filled(runs_pb2.Cause, view)


def worker_to_wire(view: WorkerView) -> runs_pb2.WorkerStatus:
    return filled(
        runs_pb2.WorkerStatus,
        view,
        inventory=inventory_to_wire(view.inventory),
        state=str(view.state),
        last_seen_s=view.last_seen,
        causes=map(cause_to_wire, view.causes),
    )


def worker_row_to_wire(row: WorkerRow, now_ms: int) -> runs_pb2.WorkerStatus:
    """Convert a worker that the core no longer knows."""
    return filled(
        runs_pb2.WorkerStatus,
        row,
        inventory=inventory_to_wire(row.inventory),
        state=str(row.state),
        last_seen_s=max(0, now_ms - (row.ended_ms or row.registered_ms)) / 1000,
    )


def check_items(ids: list[bytes], payloads: list[Blob], first_seq: int) -> set[bytes]:
    """Check the sizes of a batch, and return the objects it refers to. Raises InputError with the item and the
    remedy."""
    objects: set[bytes] = set()
    for index, blob in enumerate(payloads):
        if isinstance(blob, ObjectSlice):
            objects.add(blob.object_id)
        elif len(blob) > PAYLOAD_MAX:
            raise InputError(
                f"Row {first_seq + index + 1}: an inline payload of {len(blob)} bytes is over the limit of "
                f"{PAYLOAD_MAX}; upload it as an object and submit its reference."
            )
    for index, item_id in enumerate(ids):
        if len(item_id) != 32:
            raise InputError(f"Row {first_seq + index + 1}: an id has 32 bytes, this one {len(item_id)}.")
    return objects


def pieces(sizes: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Split rows of these sizes so that no piece [start, end) is larger than a frame (a single row may be)."""
    start = used = end = 0
    for end, size in enumerate(sizes, 1):
        if end - 1 > start and used + size > FRAME_BYTES:
            yield start, end - 1
            start, used = end - 1, 0
        used += size
    if start < end:
        yield start, end


def _inline(blob: Blob) -> int:
    return len(blob) if isinstance(blob, bytes) else 48


def commit_frames(page: CommitPage) -> Iterator[runs_pb2.CommitBatch]:
    """Yield the page in pieces that fit a frame."""
    sizes = [ROW_BYTES + _inline(data) for data in page.data]
    for index, payload in enumerate(page.payloads):
        sizes[index] += _inline(payload)
    for index, failure in page.failures.items():
        sizes[index] += len(failure.message.encode()) + len(failure.code)
    for start, end in pieces(sizes):
        yield _commit_batch(page, start, end)


def _commit_batch(page: CommitPage, start: int, end: int) -> runs_pb2.CommitBatch:
    lengths, data, refs = pack_blobs(page.data[start:end])
    table: dict[str, int] = {}
    index = [table.setdefault(worker, len(table)) for worker in page.worker[start:end]]
    batch = runs_pb2.CommitBatch(
        from_cursor=page.from_cursor + start,
        seq=page.seq[start:end],
        attempt=page.attempt[start:end],
        outcome=cast(Any, page.outcome[start:end]),
        length=lengths,
        data=data,
        refs=refs,
        errors=[failure_to_wire(i - start, f) for i, f in page.failures.items() if start <= i < end],
        duration_ms=page.duration_ms[start:end],
        accepted_ms=page.accepted_ms[start:end],
        workers=list(table),
        worker_index=index,
        units_in=page.units_in[start:end],
        units_out=page.units_out[start:end],
    )
    if page.tries[start:end] != page.attempt[start:end]:
        batch.tries.extend(page.tries[start:end])
    if page.ids:
        lengths, data, refs = pack_blobs(page.payloads[start:end])
        batch.ids = b"".join(page.ids[start:end])
        batch.payload_length.extend(lengths)
        batch.payload_data = data
        batch.payload_refs.extend(refs)
    return batch
