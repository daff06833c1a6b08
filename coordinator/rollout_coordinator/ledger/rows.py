"""Converts between the core's rows and table columns: JSON of specs, packed keys, blobs, text valid in both
databases."""

from __future__ import annotations

import json
import re
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import Any

from rollout.model.errors import StorageDamagedError
from rollout.model.ids import SHORT
from rollout.model.item import AttemptEnd, Blob, Failure, ItemSpec, ObjectSlice
from rollout.model.run import Lane, Order, Policy, RunSpec, RunState
from rollout.model.worker import Inventory, WorkerState

from rollout_coordinator.core.events import Keys
from rollout_coordinator.core.step import AttemptRow, LaneRow, LogRow, RunRow, SpecRow, WorkerRow
from rollout_coordinator.core.views import LaneView, RunView
from rollout_coordinator.ledger.port import LeaseRow

Row = Sequence[Any]

_MAX_INT = (1 << 63) - 1
_ANY_LENGTH = 1 << 30


def clean(text: str) -> str:
    """Return `text` as both databases store it: PostgreSQL refuses NUL, neither accepts lone surrogates.

    A worker's error message must never make the transaction with other workers' results fail.
    """
    if text.isascii():
        return text.replace("\x00", "\ufffd") if "\x00" in text else text
    return text.replace("\x00", "\ufffd").encode("utf-8", "replace").decode("utf-8")


def clamp(number: int) -> int:
    """Clamp a count or duration to a 64-bit column."""
    return number if -_MAX_INT <= number <= _MAX_INT else _MAX_INT


def dumps(value: Any) -> str:
    return clean(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(part) for part in value) if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType]


def _load(kind: type[Any], body: dict[str, Any]) -> Any:
    if not isinstance(body, dict):  # pyright: ignore[reportUnnecessaryIsInstance] - as it was stored, maybe damaged
        raise ValueError(f"{type(body).__name__} where {kind.__name__} should be")
    names = {field.name for field in fields(kind)}
    return kind(**{name: _tuples(value) for name, value in body.items() if name in names})


# ---- what a person types for a run

_ID_PART = re.compile(r"[0-9A-HJKMNP-TV-Z]{1,26}")


def find_columns(text: str, *, complete: bool, limit: int) -> dict[str, Any]:
    """Return the parameters of FIND_RUNS."""
    part = text.upper() if _ID_PART.fullmatch(text.upper()) else ""
    name = clean(text)
    return {
        "begins": f"{part}%" if part or (complete and not text) else "",
        "shown": "_" * (26 - SHORT) + f"{part}%" if part else "",
        "name": name,
        "name_length": len(name) if complete else _ANY_LENGTH,
        "n": limit,
    }


# ---- blobs: (inline, object_id, offset, length)


def blob_columns(blob: Blob) -> tuple[bytes | None, bytes | None, int | None, int | None]:
    if isinstance(blob, ObjectSlice):
        return None, blob.object_id, blob.offset, blob.length
    return blob, None, None, None


def blob(inline: bytes | None, object_id: bytes | None, offset: int | None, length: int | None) -> Blob:
    if object_id is None:
        return inline or b""
    return ObjectSlice(bytes(object_id), offset or 0, length or 0)


# ---- failures: (code, message, flags)


def failure_columns(failure: Failure | None) -> tuple[str | None, str | None, int | None]:
    if failure is None:
        return None, None, None
    return clean(failure.code), clean(failure.message), failure.retryable | failure.worker_lost << 1


def failure(code: str, message: str | None, flags: int | None) -> Failure:
    bits = flags or 0
    return Failure(code, message or "", bool(bits & 1), bool(bits & 2))


# ---- packed keys of an assignment: groups of <log, n, how seqs and attempts are stored> + the two arrays

_GROUP = struct.Struct("<QIBB")
_RANGE, _SEQS = 0, 1
_SAME, _BYTES, _WIDE = 0, 1, 2


def _little(values: array[int]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _from_little(data: memoryview) -> list[int]:
    values: array[int] = array("Q")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def pack_keys(groups: Iterable[Keys]) -> bytes:
    """Pack keys in about a byte an item or less for contiguous seqs, nine otherwise, at C speed."""
    parts: list[bytes] = []
    for group in groups:
        seq, attempt, n = group.seq, group.attempt, len(group.seq)
        if n == 0:
            continue
        contiguous = seq[-1] - seq[0] == n - 1 and seq == list(range(seq[0], seq[0] + n))
        highest = max(attempt)
        kind = _SAME if attempt.count(highest) == n else _BYTES if highest < 256 else _WIDE
        parts.append(_GROUP.pack(group.log, n, _RANGE if contiguous else _SEQS, kind))
        parts.append(_little(array("Q", seq[:1] if contiguous else seq)))
        if kind == _BYTES:
            parts.append(bytes(attempt))
        else:
            parts.append(_little(array("Q", attempt if kind == _WIDE else [highest])))
    return b"".join(parts)


def unpack_keys(packed: bytes) -> list[Keys]:
    """Unpack keys. Raises StorageError if the bytes are damaged."""
    groups: list[Keys] = []
    view, at = memoryview(packed), 0
    try:
        while at < len(view):
            log, n, seqs, attempts = _GROUP.unpack_from(view, at)
            at += _GROUP.size
            width = 8 if seqs == _RANGE else 8 * n
            seq = _from_little(view[at : at + width])
            at += width
            if seqs == _RANGE:
                seq = list(range(seq[0], seq[0] + n))
            width = {_SAME: 8, _BYTES: n, _WIDE: 8 * n}[attempts]
            piece = view[at : at + width]
            at += width
            attempt = list(piece) if attempts == _BYTES else _from_little(piece)
            if attempts == _SAME:
                attempt = attempt * n
            if len(seq) != n or len(attempt) != n:
                raise ValueError(f"{n} keys promised, {len(seq)} found")
            groups.append(Keys(log, seq, attempt))
    except (struct.error, ValueError, KeyError, IndexError) as error:
        raise StorageDamagedError(f"assignment.keys cannot be read ({error}): the database is damaged") from error
    return groups


# ---- specs


def spec_json(spec: ItemSpec) -> str:
    return dumps(asdict(spec))


def spec_from_json(body: str) -> ItemSpec:
    return _load(ItemSpec, json.loads(body))


def inventory_json(inventory: Inventory) -> str:
    return dumps(asdict(inventory))


def inventory_from_json(body: str) -> Inventory:
    return _load(Inventory, json.loads(body))


def _run_spec_json(spec: RunSpec) -> str:
    body = asdict(spec)
    del body["config"]
    return dumps(body)


def _run_spec(body: str, config: bytes) -> RunSpec:
    values = json.loads(body)
    values["order"] = Order(values["order"])
    values["lanes"] = [_load(Lane, lane) for lane in values["lanes"]]
    values["policies"] = [_load(Policy, policy) for policy in values["policies"]]
    return _load(RunSpec, values | {"config": bytes(config)})


# ---- rows, in the column order of queries.py


def run_columns(row: RunRow) -> Row:
    spec = row.spec
    return (
        spec.run_id, clean(spec.workload), clean(spec.name), row.state.value, clean(row.reason), spec.order.value,
        row.root_log, row.priority, _run_spec_json(spec), spec.config, row.created_ms, row.updated_ms, row.ended_ms,
        0, row.pausing_until_ms, dumps(row.survivors), clean(row.ended_by),
    )  # fmt: skip


def run_row(row: Row) -> RunRow:
    """Convert a row of RUN_COLUMNS."""
    return RunRow(
        spec=_run_spec(row[8], row[9]), state=RunState(row[3]), reason=row[4], root_log=row[6], created_ms=row[10],
        updated_ms=row[11], ended_ms=row[12], pausing_until_ms=row[14],
        survivors=_tuples(json.loads(row[15])), priority=row[7], ended_by=row[16],
    )  # fmt: skip


def log_columns(row: LogRow) -> Row:
    return (
        row.log, row.run_id, row.parent_log, row.parent_seq, row.submitted, int(row.sealed), row.cursor, row.done,
        row.failed, row.cancelled, row.skipped, row.attempts, row.retried, row.worker_lost, row.stale,
        clamp(row.units_in), clamp(row.units_out), clean(row.extra), row.invalid,
    )  # fmt: skip


def log_row(row: Row) -> LogRow:
    values: list[Any] = [*row[:5], bool(row[5]), *row[6:19]]
    return LogRow(*values)


def lane_columns(row: LaneRow) -> Row:
    return row.run_id, clean(row.lane), row.done, row.failed, row.consecutive_failures, row.pruned_at


def lane_row(row: Row) -> LaneRow:
    return LaneRow(*row)


def spec_row(row: Row) -> SpecRow:
    return SpecRow(row[0], row[1], spec_from_json(row[2]))


def worker_columns(row: WorkerRow) -> Row:
    return (
        row.incarnation, clean(row.host_id), inventory_json(row.inventory), row.state.value, row.registered_ms,
        row.ended_ms, clean(row.reason),
    )  # fmt: skip


def worker_row(row: Row) -> WorkerRow:
    return WorkerRow(row[0], row[1], inventory_from_json(row[2]), WorkerState(row[3]), row[4], row[5], row[6])


def attempt_columns(row: AttemptRow) -> Row:
    return (
        row.log, row.seq, row.attempt, clean(row.worker), AttemptEnd(row.end).value, clean(row.code),
        clean(row.message), row.at_ms, row.not_before_ms, row.began_ms, clamp(row.left.units_in),
        clamp(row.left.units_out), *blob_columns(row.left.data),
    )  # fmt: skip


def lease_row(row: Row) -> LeaseRow:
    return LeaseRow(row[0], row[1], row[2], row[3], bool(row[4]), row[5])


def lease_columns(row: LeaseRow, prefix: str = "") -> dict[str, Any]:
    """Return parameters of a statement, with names after `prefix`."""
    columns = {
        "holder": row.holder, "epoch": row.epoch, "batch": row.batch, "beat": row.beat,
        "released": int(row.released), "address": row.address,
    }  # fmt: skip
    return {prefix + name: value for name, value in columns.items()}


def run_view(run: RunRow, log: LogRow | None, lanes: list[LaneRow]) -> RunView:
    """Return the view of a run in the ledger; what is in flight only the core knows."""
    if log is None:
        log = LogRow(run.root_log, run.spec.run_id, 0, 0, 0, False, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    caps = {lane.name: lane.max_in_flight for lane in run.spec.lanes}
    views = [
        LaneView(
            lane.lane, caps.get(lane.lane, 0), 0, lane.done, lane.failed, lane.consecutive_failures, lane.pruned_at
        )
        for lane in lanes
    ]
    return RunView(
        spec=run.spec, state=run.state, reason=run.reason, root_log=run.root_log, priority=run.priority,
        submitted=log.submitted, sealed=log.sealed, cursor=log.cursor, done=log.done, failed=log.failed,
        cancelled=log.cancelled, skipped=log.skipped, in_flight=0, running=0, attempts=log.attempts,
        retried=log.retried, worker_lost=log.worker_lost, stale=log.stale, units_in=log.units_in,
        units_out=log.units_out, created_ms=run.created_ms, updated_ms=run.updated_ms, ended_ms=run.ended_ms,
        pausing=run.pausing_until_ms > 0, survivors=run.survivors, lanes=views,
        ended_by=run.ended_by, invalid=log.invalid,
        busy_ms=json.loads(log.extra).get("busy_ms", 0) if '"busy_ms"' in log.extra else 0,
    )  # fmt: skip
