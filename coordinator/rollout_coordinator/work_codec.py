"""Converts Work frames: bodies of WorkUp to core events, sends of the core to WorkDown frames of at most 1 MiB."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from rollout.model.errors import ProtocolError
from rollout.model.item import Blob, Key, ObjectSlice, Outcome
from rollout.model.run import RunSpec
from rollout.objects.digest import ID_BYTES
from rollout.wire.codec import (
    check_units,
    credit_from_wire,
    failure_to_wire,
    failures_from_wire,
    inventory_from_wire,
    item_batch_from_wire,
    pack_blobs,
    spec_table,
    unpack_blobs,
)
from rollout.wire.v1 import common_pb2, work_pb2

from rollout_coordinator.core.events import (
    CannotStart,
    Event,
    Keys,
    ResultGroup,
    ResultsLoaded,
    WorkerCauses,
    WorkerConfirm,
    WorkerCredit,
    WorkerGoodbye,
    WorkerHello,
    WorkerLeaving,
    WorkerProgress,
    WorkerReleased,
    WorkerResults,
    WorkerSpawn,
    WorkerStarted,
    WorkerWaiting,
)
from rollout_coordinator.core.step import (
    AssignGroup,
    Send,
    SendAccepted,
    SendCancel,
    SendChildren,
    SendPause,
    SendResume,
    SendRevoke,
    SendRunEnded,
    SendWelcome,
)
from rollout_coordinator.runs_codec import FRAME_BYTES, pieces
from rollout_coordinator.sessions import AssignWithRuns

ROW_BYTES = 64  # of an item or result besides its inline bytes
KEYS_MAX = 50_000  # of one frame
ERROR_TEXT_MAX = 4096


def _keys(wire: Iterable[common_pb2.AttemptKeys]) -> list[Keys]:
    found: list[Keys] = []
    for keys in wire:
        if len(keys.seq) != len(keys.attempt):
            raise ProtocolError(f"AttemptKeys: {len(keys.seq)} seqs but {len(keys.attempt)} attempts.")
        found.append(Keys(keys.log, list(keys.seq), list(keys.attempt)))
    return found


def _column(values: Sequence[int], count: int, name: str) -> list[int] | None:
    if not values:
        return None
    if len(values) != count:
        raise ProtocolError(f"Results: {count} seqs but {len(values)} entries of {name}.")
    return list(values)


def result_group(group: work_pb2.ResultGroup) -> ResultGroup:
    """Convert a group of results. Raises ProtocolError if the columns disagree."""
    count = len(group.seq)
    attempt = _column(group.attempt, count, "attempt")
    if attempt is None and count:
        raise ProtocolError("Results: no attempt numbers.")
    try:
        outcome = [Outcome(o) for o in group.outcome] or None
    except ValueError as error:
        raise ProtocolError(f"Results: {error}.") from error
    if outcome is not None and len(outcome) != count:
        raise ProtocolError(f"Results: {count} seqs but {len(outcome)} outcomes.")
    lengths = group.length or [0] * count
    data = unpack_blobs(lengths, group.data, group.refs)
    if len(data) != count:
        raise ProtocolError(f"Results: {count} seqs but {len(data)} results.")
    failures = failures_from_wire(group.errors)
    if any(index >= count for index in failures):
        raise ProtocolError("Results: an error names an entry that is not there.")
    check_units(group.units_in)
    check_units(group.units_out)
    keeps = {kept.index: tuple(kept.object_ids) for kept in group.kept}
    if any(index >= count or any(len(one) != ID_BYTES for one in ids) for index, ids in keeps.items()):
        raise ProtocolError("Results: an object to keep that is none.")
    return ResultGroup(
        log=group.log,
        seq=list(group.seq),
        attempt=attempt or [],
        outcome=outcome,
        data=data,
        failures=failures,
        duration_ms=_column(group.duration_ms, count, "duration_ms") or [0] * count,
        units_in=_column(group.units_in, count, "units_in"),
        units_out=_column(group.units_out, count, "units_out"),
        keeps=keeps,
    )


def hello_event(frame: work_pb2.WorkUp, host_id: str, address: str = "") -> WorkerHello:
    hello = frame.hello
    return WorkerHello(
        session=frame.session,
        incarnation=hello.incarnation,
        host_id=host_id,
        inventory=inventory_from_wire(hello.inventory),
        credit=credit_from_wire(hello.credit),
        held=_keys(hello.held),
        started=_keys(hello.held_started),
        unacknowledged=_keys(hello.unacknowledged),
        draining=hello.draining,
        preempted=hello.preempted,
        address=address,
    )


def up_event(frame: work_pb2.WorkUp) -> Event:
    """Return the event of a frame after Hello. Raises ProtocolError for an empty or misplaced body."""
    kind = frame.WhichOneof("body")
    session = frame.session
    if kind == "results":
        return WorkerResults(session, [result_group(g) for g in frame.results.groups])
    if kind == "started":
        return WorkerStarted(session, _keys(frame.started.keys))
    if kind == "credit":
        return WorkerCredit(session, credit_from_wire(frame.credit))
    if kind == "released":
        return WorkerReleased(session, _keys(frame.released.keys), frame.released.reason)
    if kind == "causes":
        return WorkerCauses(session, [_cause(said) for said in frame.causes.causes])
    if kind == "confirm":
        body = frame.confirm
        return WorkerConfirm(session, body.revoke_id, _keys(body.given_up), _keys(body.kept))
    if kind == "progress":
        body = frame.progress
        return WorkerProgress(session, _keys(body.keys), body.note, body.figures)
    if kind == "spawn":
        body = frame.spawn
        first, ids, payloads, specs, index = item_batch_from_wire(body.items)
        if any(len(one) != ID_BYTES for one in (*body.keeps, *body.lets_go)):
            raise ProtocolError("Spawn: an object to keep that is none.")
        return WorkerSpawn(
            session, Key(body.log, body.seq), body.attempt, first, ids, payloads, specs, index, body.seal,
            keeps=tuple(body.keeps), lets_go=tuple(body.lets_go),
        )  # fmt: skip
    if kind == "waiting":
        body = frame.waiting
        return WorkerWaiting(session, Key(body.log, body.seq), body.attempt, body.from_child, body.holds)
    if kind == "goodbye":
        return WorkerGoodbye(session, frame.goodbye.reason)
    if kind == "leaving":
        return WorkerLeaving(session, frame.leaving.reason, frame.leaving.preempted)
    if kind == "hello":
        raise ProtocolError("A stream carries one Hello, as its first frame.")
    raise ProtocolError("A Work frame without a body.")


def _cause(said: work_pb2.CannotStart) -> CannotStart:
    limits = None if said.any_resources else (said.gpus, said.memory_mib)
    return CannotStart(
        said.run_id, said.executor, limits, said.code, said.message, said.times, said.final, said.retry_in_ms / 1000
    )


def event_objects(event: Event) -> set[bytes]:
    """Return ids of the objects that an event's payloads refer to (results are checked one by one instead)."""
    blobs: list[Blob] = getattr(event, "payloads", [])
    return {b.object_id for b in blobs if isinstance(b, ObjectSlice)}


# ---- down


def _wire_keys(keys: Iterable[Keys]) -> list[common_pb2.AttemptKeys]:
    return [common_pb2.AttemptKeys(log=k.log, seq=k.seq, attempt=k.attempt) for k in keys]


def _key_chunks(keys: Iterable[Keys]) -> Iterator[list[Keys]]:
    chunk: list[Keys] = []
    room = KEYS_MAX
    for one in keys:
        for start in range(0, len(one.seq), KEYS_MAX):
            part = Keys(one.log, one.seq[start : start + KEYS_MAX], one.attempt[start : start + KEYS_MAX])
            if chunk and len(part.seq) > room:
                yield chunk
                chunk, room = [], KEYS_MAX
            chunk.append(part)
            room -= len(part.seq)
    if chunk:
        yield chunk


def down_frames(send: Send | AssignWithRuns, cluster: str, objects_addr: str) -> Iterator[work_pb2.WorkDown]:
    """Yield the frames of a send, each at most 1 MiB; the caller stamps epoch and session."""
    if isinstance(send, AssignWithRuns):
        yield from _assign_frames(send)
    elif isinstance(send, SendAccepted):
        for chunk in _key_chunks(send.accepted):
            yield work_pb2.WorkDown(accepted=work_pb2.Accepted(accepted=_wire_keys(chunk)))
        for chunk in _key_chunks(send.stale):
            yield work_pb2.WorkDown(accepted=work_pb2.Accepted(stale=_wire_keys(chunk)))
    elif isinstance(send, SendChildren):
        yield from _children_frames(send)
    elif isinstance(send, SendWelcome):
        welcome = work_pb2.Welcome(
            cluster=cluster,
            keep=_wire_keys(send.keep),
            drop=_wire_keys(send.drop),
            resend=_wire_keys(send.resend),
            accepted=_wire_keys(send.accepted),
            objects_addr=objects_addr,
            max_frame_bytes=1 << 20,
        )
        yield work_pb2.WorkDown(welcome=welcome)
    elif isinstance(send, SendRevoke):
        yield work_pb2.WorkDown(revoke=work_pb2.Revoke(revoke_id=send.revoke_id, keys=_wire_keys(send.keys)))
    elif isinstance(send, SendCancel):
        for chunk in _key_chunks(send.keys):
            yield work_pb2.WorkDown(cancel=work_pb2.Cancel(keys=_wire_keys(chunk), reason=send.reason))
    elif isinstance(send, SendPause):
        yield work_pb2.WorkDown(pause=work_pb2.Pause(run_id=send.run_id, deadline_ms=send.deadline_ms))
    elif isinstance(send, SendResume):
        resume = work_pb2.Resume(log=send.parent.log, seq=send.parent.seq, attempt=send.attempt)
        yield work_pb2.WorkDown(resume=resume)
    elif isinstance(send, SendRunEnded):
        yield work_pb2.WorkDown(ended=work_pb2.RunEnded(run_id=send.run_id, state=send.state))
    else:
        raise TypeError(f"{type(send).__name__} does not travel on Work")


def _size(blob: Blob) -> int:
    return ROW_BYTES + (len(blob) if isinstance(blob, bytes) else 0)


def _pieces(blobs: Sequence[Blob], extra: dict[int, int]) -> Iterator[tuple[int, int]]:
    return pieces(_size(blob) + extra.get(index, 0) for index, blob in enumerate(blobs))


def _assign_frames(assign: AssignWithRuns) -> Iterator[work_pb2.WorkDown]:
    frame = work_pb2.Assign()
    used = 0
    runs = dict(assign.runs)
    for group in assign.send.groups:
        extra = {index: _size(data) for index, _, _, data in group.predecessors}
        for index, handed in group.handoff.items():
            extra[index] = extra.get(index, 0) + len(handed)
        for start, end in _pieces(group.payloads, extra):
            wire = _assign_piece(group, start, end, runs.pop(group.run_id, None))
            size = wire.ByteSize()
            if used and used + size > FRAME_BYTES:
                yield work_pb2.WorkDown(assign=frame)
                frame, used = work_pb2.Assign(), 0
            frame.groups.append(wire)
            used += size
    if used:
        yield work_pb2.WorkDown(assign=frame)


def _context(run_id: str, spec: RunSpec | None) -> work_pb2.RunContext:
    if spec is None:
        return work_pb2.RunContext(run_id=run_id)
    return work_pb2.RunContext(run_id=run_id, workload=spec.workload, config=spec.config, name=spec.name)


def _assign_piece(group: AssignGroup, start: int, end: int, spec: RunSpec | None) -> work_pb2.AssignGroup:
    lengths, data, refs = pack_blobs(group.payloads[start:end])
    specs, spec_index = spec_table(group.specs[start:end])
    wire = work_pb2.AssignGroup(
        log=group.log,
        run=_context(group.run_id, spec),
        seq=group.seq[start:end],
        attempt=group.attempt[start:end],
        ids=b"".join(group.ids[start:end]),
        length=lengths,
        data=data,
        refs=refs,
        specs=specs,
        spec_index=spec_index,
        isolate=[i - start for i in group.isolate if start <= i < end],
        failures={i - start: n for i, n in group.failures.items() if start <= i < end},
        handoff={i - start: data for i, data in group.handoff.items() if start <= i < end},
        losses={i - start: n for i, n in group.losses.items() if start <= i < end},
    )
    if group.parent is not None:
        wire.parent_log, wire.parent_seq = group.parent
    for index, seq, attempt, blob in group.predecessors:
        if start <= index < end:
            before = wire.predecessors.add(index=index - start, seq=seq, attempt=attempt)
            if isinstance(blob, bytes):
                before.data = blob
            else:
                before.ref.object_id, before.ref.offset, before.ref.length = blob
    return wire


def _children_frames(send: SendChildren) -> Iterator[work_pb2.WorkDown]:
    results = send.results
    assert isinstance(results, ResultsLoaded)
    extra = {i: len(f.code) + min(len(f.message), ERROR_TEXT_MAX) for i, f in results.failures.items()}
    total = len(results.data)
    for start, end in _pieces(results.data, extra) if total else [(0, 0)]:
        lengths, data, refs = pack_blobs(results.data[start:end])
        children = work_pb2.ChildResults(
            parent_log=send.parent.log,
            parent_seq=send.parent.seq,
            from_child=send.from_child + start,
            outcome=cast(Any, results.outcome[start:end]),
            length=lengths,
            data=data,
            refs=refs,
            errors=[failure_to_wire(i - start, f) for i, f in results.failures.items() if start <= i < end],
            complete=send.complete and end == total,
        )
        yield work_pb2.WorkDown(children=children)
