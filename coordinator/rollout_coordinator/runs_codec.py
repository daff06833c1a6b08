"""Views of runs and workers, and pages of the commit log, as wire messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from rollout.model.errors import InputError
from rollout.model.item import Blob, ObjectSlice
from rollout.wire.codec import failure_to_wire, inventory_to_wire, pack_blobs, run_spec_to_wire
from rollout.wire.v1 import runs_pb2

from rollout_coordinator.core.step import WorkerRow
from rollout_coordinator.core.views import CauseView, RunView, WorkerView
from rollout_coordinator.ledger.port import CommitPage

PAYLOAD_MAX = 64 << 10
CONFIG_MAX = 512 << 10
FRAME_BYTES = 900 << 10
ROW_BYTES = 96  # of a commit log entry besides its inline bytes


def status_to_wire(view: RunView) -> runs_pb2.RunStatus:
    status = runs_pb2.RunStatus(
        spec=run_spec_to_wire(view.spec),
        state=str(view.state),
        reason=view.reason,
        submitted=view.submitted,
        sealed=view.sealed,
        cursor=view.cursor,
        done=view.done,
        failed=view.failed,
        cancelled=view.cancelled,
        skipped=view.skipped,
        in_flight=view.in_flight,
        running=view.running,
        attempts=view.attempts,
        retried=view.retried,
        worker_lost=view.worker_lost,
        stale=view.stale,
        units_in=view.units_in,
        units_out=view.units_out,
        created_ms=view.created_ms,
        updated_ms=view.updated_ms,
        ended_ms=view.ended_ms,
        root_log=view.root_log,
        workers=view.workers,
        pausing=view.pausing,
        ended_by=view.ended_by,
        invalid=view.invalid,
        rate=view.rate,
        units_rate=view.units_rate,
        note=view.note,
        figures=view.figures,
        figures_of_each=view.figures_of_each,
        skips_rest=view.skips_rest,
        busy_ms=view.busy_ms,
    )
    status.spec.priority = view.priority
    for log, seq, attempt, _ in view.survivors:
        status.survivors.add(log=log, seq=[seq], attempt=[attempt])
    for lane in view.lanes:
        status.lanes.add(
            name=lane.name,
            max_in_flight=lane.max_in_flight,
            in_flight=lane.in_flight,
            done=lane.done,
            failed=lane.failed,
            consecutive_failures=lane.consecutive_failures,
            pruned=lane.pruned_at >= 0,
            pruned_at=max(lane.pruned_at, 0),
        )
    status.causes.extend(map(cause_to_wire, view.causes))
    for wait in view.waits:
        status.waits.add(reason=wait.reason, message=wait.message, items=wait.items, impossible=wait.impossible)
    return status


def cause_to_wire(view: CauseView) -> runs_pb2.Cause:
    return runs_pb2.Cause(
        run_id=view.run_id,
        executor=view.executor,
        code=view.code,
        message=view.message,
        workers=view.workers,
        hosts=view.hosts,
        times=view.times,
        first_ms=view.first_ms,
        last_ms=view.last_ms,
        everywhere=view.everywhere,
    )


def worker_to_wire(view: WorkerView) -> runs_pb2.WorkerStatus:
    return runs_pb2.WorkerStatus(
        incarnation=view.incarnation,
        inventory=inventory_to_wire(view.inventory),
        state=str(view.state),
        in_flight=view.in_flight,
        running=view.running,
        registered_ms=view.registered_ms,
        last_seen_s=view.last_seen,
        reason=view.reason,
        load=view.load,
        cpu_percent=view.cpu_percent,
        memory_mib=view.memory_mib,
        done=view.done,
        causes=map(cause_to_wire, view.causes),
        host_id=view.host_id,
    )


def worker_row_to_wire(row: WorkerRow, now_ms: int) -> runs_pb2.WorkerStatus:
    """A worker that the core no longer knows."""
    return runs_pb2.WorkerStatus(
        incarnation=row.incarnation,
        inventory=inventory_to_wire(row.inventory),
        state=str(row.state),
        registered_ms=row.registered_ms,
        last_seen_s=max(0, now_ms - (row.ended_ms or row.registered_ms)) / 1000,
        reason=row.reason,
        ended_ms=row.ended_ms,
        host_id=row.host_id,
    )


def check_items(ids: list[bytes], payloads: list[Blob], first_seq: int) -> set[bytes]:
    """Sizes of a batch; the objects it refers to. InputError says which item and what to do."""
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


def _inline(blobs: list[Blob], index: int) -> int:
    if index >= len(blobs):
        return 0
    blob = blobs[index]
    return len(blob) if isinstance(blob, bytes) else 48


def commit_frames(page: CommitPage) -> Iterator[runs_pb2.CommitBatch]:
    """The page in pieces that fit a frame."""
    start = used = 0
    for index in range(len(page.seq)):
        failure = page.failures.get(index)
        size = ROW_BYTES + _inline(page.data, index) + _inline(page.payloads, index)
        size += len(failure.message.encode()) + len(failure.code) if failure else 0
        if index > start and used + size > FRAME_BYTES:
            yield _commit_batch(page, start, index)
            start, used = index, 0
        used += size
    if start < len(page.seq):
        yield _commit_batch(page, start, len(page.seq))


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
