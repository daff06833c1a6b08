"""Messages of a child process, parsed and checked, because user code may have written to its socket. Pure.

Whatever the bytes, either the session gets an event whose columns agree and that it may pass on to the coordinator, or
the caller gets ProtocolError and ends that child. No child can make its worker violate the protocol with the
coordinator.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, cast

from google.protobuf.message import DecodeError
from rollout.model.errors import ProtocolError
from rollout.model.item import Failure, Outcome
from rollout.objects.digest import ID_BYTES
from rollout.wire.codec import (
    INT_MAX,
    check_units,
    failures_from_wire,
    item_batch_from_wire,
    text_for_wire,
    unpack_blobs,
)
from rollout.wire.pieces import PIECE_MAX
from rollout.wire.v1 import common_pb2, work_pb2

from rollout_worker import session_events as ev
from rollout_worker.attempts import FRAME_BYTES, AttemptKey, replica_key
from rollout_worker.processes.kinds import Kind

WIDTH_MAX = 65_536
"""Maximum concurrent attempts of one process: the largest `[backend] max_num_seqs`."""
NOTE_MAX = 1000  # characters
FIGURES_MAX = 4096  # bytes
_RELAYED = frozenset({"announce", "withdraw", "said"})
_OUTCOMES = frozenset(int(o) for o in Outcome)


def read_frame(child: int, kind: int, body: bytes) -> ev.Event:
    """Return the event of any frame but a question. Raises ProtocolError."""
    reader = _READERS.get(kind)
    if reader is None:
        raise ProtocolError(f"unknown frame kind {kind}")
    try:
        return reader(child, body)
    except DecodeError as error:
        raise ProtocolError(f"not a message: {error}") from error


def read_question(body: bytes) -> dict[str, Any]:
    """Return a question with its `id`. Raises ProtocolError."""
    question = _object(body)
    if "id" not in question:
        raise ProtocolError("a question without an id")
    return question


def _object(body: bytes) -> dict[str, Any]:
    try:
        value: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ProtocolError(f"{type(value).__name__} instead of a JSON object")
    return cast("dict[str, Any]", value)


def _ready(child: int, body: bytes) -> ev.Event:
    said = _object(body)
    width, ahead = said.get("width"), said.get("ahead", 0)
    if type(width) is not int or not 1 <= width <= WIDTH_MAX:
        raise ProtocolError(f"width {width!r} is no number from 1 to {WIDTH_MAX}")
    if type(ahead) is not int or not 0 <= ahead <= WIDTH_MAX:
        raise ProtocolError(f"ahead {ahead!r} is no number from 0 to {WIDTH_MAX}")
    return ev.ChildReady(child, width, ahead)


def _failed(child: int, body: bytes) -> ev.Event:
    return ev.ChildFailed(child, _failure(_object(body)))


def _failure(said: dict[str, Any]) -> Failure:
    code, message, retryable = said.get("code"), said.get("message"), said.get("retryable")
    if not isinstance(code, str) or not isinstance(message, str) or not isinstance(retryable, bool):
        raise ProtocolError("a failure needs a code, a message and whether it may be tried again")
    return Failure(text_for_wire(code), text_for_wire(message), retryable)


def _results(child: int, body: bytes) -> ev.Event:
    group = work_pb2.ResultGroup.FromString(body)
    count = len(group.seq)
    blobs = unpack_blobs(group.length, group.data, ())
    if group.refs or not len(blobs) == len(group.attempt) == count:
        raise ProtocolError("results of a child: columns disagree")
    for name in ("outcome", "duration_ms", "units_in", "units_out"):
        if len(getattr(group, name)) not in (0, count):
            raise ProtocolError(f"results of a child: {count} seqs but {len(getattr(group, name))} of {name}")
    if not _OUTCOMES.issuperset(group.outcome):
        raise ProtocolError("results of a child: an outcome that is none")
    check_units(group.units_in)
    check_units(group.units_out)
    if any(kept.index >= count or any(len(one) != ID_BYTES for one in kept.object_ids) for kept in group.kept):
        raise ProtocolError("results of a child: an object to keep that is none")
    if any(index >= count for index in failures_from_wire(group.errors)):
        raise ProtocolError("results of a child: an error names an entry that is not there")
    return ev.ChildResults(child, group)


def _pairs(keys: common_pb2.AttemptKeys) -> list[AttemptKey]:
    if len(keys.seq) != len(keys.attempt):
        raise ProtocolError("keys of a child: columns disagree")
    return [AttemptKey(keys.log, seq, attempt) for seq, attempt in zip(keys.seq, keys.attempt, strict=True)]


def _returned(child: int, body: bytes) -> ev.Event:
    return ev.ChildReturned(child, _pairs(common_pb2.AttemptKeys.FromString(body)))


def _spawned(child: int, body: bytes) -> ev.Event:
    if len(body) > FRAME_BYTES:
        raise ProtocolError(f"a spawn of {len(body)} bytes, over the limit of {FRAME_BYTES}")
    spawn = work_pb2.Spawn.FromString(body)
    item_batch_from_wire(spawn.items)
    if any(len(one) != ID_BYTES for one in (*spawn.keeps, *spawn.lets_go)):
        raise ProtocolError("a spawn: an object to keep that is none")
    return ev.ChildSpawned(child, spawn)


def _waits(child: int, body: bytes) -> ev.Event:
    waiting = work_pb2.Waiting.FromString(body)
    if waiting.from_child > INT_MAX:
        raise ProtocolError("waits for a child that cannot be")
    return ev.ChildWaits(child, waiting)


def _progress(child: int, body: bytes) -> ev.Event:
    said = work_pb2.Progress.FromString(body)
    keys: Sequence[AttemptKey] = _pairs(said.keys[0]) if said.keys else []
    if not keys:
        raise ProtocolError("progress of no attempt")
    if len(said.figures) > FIGURES_MAX:
        raise ProtocolError(f"progress with {len(said.figures)} bytes of figures")
    if said.figures:
        _object(said.figures)
    return ev.ChildProgress(child, keys[0], text_for_wire(said.note[:NOTE_MAX]), said.figures)


def _hindered(child: int, body: bytes) -> ev.Event:
    said = _object(body)
    log, seq, attempt, returned = (said.get(name) for name in ("log", "seq", "attempt", "returned"))
    if not all(type(number) is int for number in (log, seq, attempt)) or not isinstance(returned, bool):
        raise ProtocolError("a hindrance of no attempt")
    failure = _failure(said)
    key = AttemptKey(cast(int, log), cast(int, seq), cast(int, attempt))
    return ev.ChildHindered(child, key, failure, returned)


def _relays(child: int, body: bytes) -> ev.Event:
    frame = work_pb2.WorkUp.FromString(body)
    kind = frame.WhichOneof("body")
    if kind not in _RELAYED:
        raise ProtocolError(f"a replica says {kind}")
    if len(frame.said.data) > PIECE_MAX:
        raise ProtocolError(f"a replica says {len(frame.said.data)} bytes, over the limit of {PIECE_MAX}")
    key = replica_key(getattr(frame, kind).replica)
    if max(key) > INT_MAX:
        raise ProtocolError("a replica that cannot be")
    return ev.ChildRelays(child, key, frame)


_READERS: dict[int, Callable[[int, bytes], ev.Event]] = {
    Kind.RESULTS: _results,
    Kind.RETURNED: _returned,
    Kind.READY: _ready,
    Kind.FAILED: _failed,
    Kind.SPAWN: _spawned,
    Kind.WAITING: _waits,
    Kind.PROGRESS: _progress,
    Kind.HINDERED: _hindered,
    Kind.RELAY: _relays,
}
