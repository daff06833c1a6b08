"""Conversion between wire messages and model values.

Strict on input: whatever a peer sends that does not fit raises ProtocolError, which names the field. Fast for rows:
columns are cut out of one bytes object, and the few distinct specs are decoded once and shared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, cast

from rollout.model.errors import ProtocolError
from rollout.model.ids import is_ulid
from rollout.model.item import DEFAULT_SPEC, Blob, Failure, ItemSpec, NewItem, ObjectSlice
from rollout.model.run import Lane, Order, Policy, RunSpec
from rollout.model.worker import Credit, Inventory
from rollout.wire.v1 import common_pb2, runs_pb2, work_pb2

ID_BYTES = 32
ERROR_TEXT_MAX = 4096
ERROR_CODE_MAX = 128
RETRY_AFTER_MAX_MS = 24 * 3600 * 1000
INT_MAX = (1 << 63) - 1  # both databases store signed 64 bit
UNITS_MAX = (1 << 32) - 1
"""Maximum units (tokens) of one result, so that their sum over a run fits."""
NAME_MAX = 1024
"""Maximum bytes of a lane's name: it is part of a key, which PostgreSQL limits to 2,700."""
CONFIG_DEPTH = 100
"""Maximum nesting of a run's configuration, because comparing, copying and printing it recurse."""


# ---- blobs and ids


def pack_blobs(blobs: Sequence[Blob]) -> tuple[list[int], bytes, list[common_pb2.IndexedRef]]:
    """Return the columns (lengths, data, refs) of payloads or results."""
    try:
        data = b"".join(blobs)  # type: ignore[arg-type]  # the usual case: all inline; a slice raises TypeError
        return list(map(len, blobs)), data, []
    except TypeError:
        pass
    lengths: list[int] = []
    inline: list[bytes] = []
    refs: list[common_pb2.IndexedRef] = []
    for index, blob in enumerate(blobs):
        if isinstance(blob, ObjectSlice):
            refs.append(common_pb2.IndexedRef(index=index, ref=ref_to_wire(blob)))
            lengths.append(0)
        else:
            inline.append(blob)
            lengths.append(len(blob))
    return lengths, b"".join(inline), refs


def unpack_blobs(lengths: Sequence[int], data: bytes, refs: Iterable[common_pb2.IndexedRef]) -> list[Blob]:
    """Return the blobs of such columns. Raises ProtocolError if sizes disagree or a ref is out of place."""
    ends = list(accumulate(lengths, initial=0))
    if ends[-1] != len(data):
        raise ProtocolError(f"length: the entries sum to {ends[-1]} bytes but data holds {len(data)}")
    blobs: list[Blob] = [data[a:b] for a, b in pairwise(ends)]
    count = len(blobs)
    for entry in refs:
        index = entry.index
        if index >= count:
            raise ProtocolError(f"refs: index {index} is out of range, there are {count} entries")
        if lengths[index] or isinstance(blobs[index], ObjectSlice):
            raise ProtocolError(f"refs: entry {index} has inline bytes or another ref too")
        blobs[index] = ref_from_wire(entry.ref)
    return blobs


def ref_to_wire(ref: ObjectSlice) -> common_pb2.ObjectRef:
    return common_pb2.ObjectRef(object_id=ref.object_id, offset=ref.offset, length=ref.length)


def ref_from_wire(ref: common_pb2.ObjectRef) -> ObjectSlice:
    if len(ref.object_id) != ID_BYTES:
        raise ProtocolError(f"refs: object_id has {len(ref.object_id)} bytes, it must have {ID_BYTES}")
    if ref.offset + ref.length > INT_MAX:
        raise ProtocolError("refs: offset and length do not fit 63 bits")
    return ObjectSlice(ref.object_id, ref.offset, ref.length)


def split_ids(ids: bytes) -> list[bytes]:
    """Split into 32 bytes each. Raises ProtocolError if the length is no multiple of that."""
    if len(ids) % ID_BYTES:
        raise ProtocolError(f"ids: {len(ids)} bytes are no multiple of {ID_BYTES}")
    return [ids[at : at + ID_BYTES] for at in range(0, len(ids), ID_BYTES)]


# ---- specs


@lru_cache(maxsize=4096)
def spec_to_wire(spec: ItemSpec) -> common_pb2.ItemSpec:
    """Return a message that calls share: copy it into another, and do not change it."""
    return common_pb2.ItemSpec(
        lane=spec.lane,
        chain=spec.chain,
        # An empty map on the wire means the default of one slot; an item that takes nothing says so.
        resources=dict(spec.resources) or {"slots": 0.0},
        require_roles=spec.require_roles,
        require_labels=dict(spec.require_labels),
        require_plugin=spec.require_plugin,
        affinity=spec.affinity,
        group=spec.group,
        priority=spec.priority,
        timeout_ms=spec.timeout_ms,
        max_attempts=spec.max_attempts,
        max_worker_lost=spec.max_worker_lost,
        fail_on_worker_lost=spec.fail_on_worker_lost,
        exclusive=spec.exclusive,
        pipelined=spec.pipelined,
        not_before_ms=spec.not_before_ms,
        retry_backoff_ms=spec.retry_backoff_ms,
        cost=spec.cost,
        executor=spec.executor,
    )


def spec_from_wire(wire: common_pb2.ItemSpec) -> ItemSpec:
    """Return the spec; equal messages give the same object. Unset counts and resources take the model's defaults."""
    return _spec_of_bytes(wire.SerializeToString())


@lru_cache(maxsize=4096)
def _spec_of_bytes(body: bytes) -> ItemSpec:
    wire = common_pb2.ItemSpec.FromString(body)
    if wire.not_before_ms < 0:
        raise ProtocolError(f"spec.not_before_ms: {wire.not_before_ms} is negative")
    check_name("spec.lane", wire.lane)
    check_name("spec.executor", wire.executor)
    _check_size("spec.timeout_ms", wire.timeout_ms)
    _check_size("spec.retry_backoff_ms", wire.retry_backoff_ms)
    return ItemSpec(
        lane=wire.lane,
        chain=wire.chain,
        resources=_amounts("spec.resources", wire.resources) or DEFAULT_SPEC.resources,
        require_roles=tuple(wire.require_roles),
        require_labels=tuple(sorted(wire.require_labels.items())),
        require_plugin=wire.require_plugin,
        affinity=wire.affinity,
        group=wire.group,
        priority=wire.priority,
        timeout_ms=wire.timeout_ms,
        max_attempts=wire.max_attempts or DEFAULT_SPEC.max_attempts,
        max_worker_lost=wire.max_worker_lost or DEFAULT_SPEC.max_worker_lost,
        fail_on_worker_lost=wire.fail_on_worker_lost,
        exclusive=wire.exclusive,
        pipelined=wire.pipelined,
        not_before_ms=wire.not_before_ms,
        retry_backoff_ms=wire.retry_backoff_ms,
        cost=wire.cost,
        executor=wire.executor,
    )


def _amounts(field: str, wire: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    for name, value in wire.items():
        if not name:
            raise ProtocolError(f"{field}: a resource has no name")
        if not math.isfinite(value) or value < 0:
            raise ProtocolError(f"{field}: {name} = {value} must be a finite number, 0 or more")
    return tuple(sorted(wire.items()))


def check_name(field: str, text: str) -> None:
    """Raise ProtocolError for a name too long for a key, or with a NUL, which PostgreSQL cannot store."""
    if "\x00" in text or len(text.encode()) > NAME_MAX:
        raise ProtocolError(f"{field}: it has a NUL or more than {NAME_MAX} bytes")


def check_units(units: Iterable[int]) -> None:
    if max(units, default=0) > UNITS_MAX:
        raise ProtocolError(f"units: a result has more than {UNITS_MAX}")


def _check_size(field: str, value: int) -> None:
    if value > INT_MAX:
        raise ProtocolError(f"{field}: {value} does not fit 63 bits")


def spec_table(specs: Sequence[ItemSpec]) -> tuple[list[common_pb2.ItemSpec], list[int]]:
    """Return the distinct specs and an index into them, which is empty if there is only one."""
    if not specs:
        return [], []
    first = specs[0]
    if all(spec is first for spec in specs):
        return [spec_to_wire(first)], []
    places: dict[ItemSpec, int] = {}
    index = [places.setdefault(spec, len(places)) for spec in specs]
    return [spec_to_wire(spec) for spec in places], index if len(places) > 1 else []


def spec_columns_from_wire(
    specs: Iterable[common_pb2.ItemSpec], spec_index: Sequence[int], count: int
) -> tuple[tuple[ItemSpec, ...], list[int] | None]:
    """Return the table and, unless all entries use its first spec, the index of each."""
    table = tuple(map(spec_from_wire, specs)) or (DEFAULT_SPEC,)
    if not spec_index:
        return table, None
    if len(spec_index) != count:
        raise ProtocolError(f"spec_index: {len(spec_index)} entries for {count} items")
    index = list(spec_index)
    if max(index) >= len(table):
        raise ProtocolError(f"spec_index: {max(index)} is out of range, there are {len(table)} specs")
    return table, index


# ---- items


def item_batch_to_wire(first_seq: int, items: Sequence[NewItem]) -> common_pb2.ItemBatch:
    """Encode items. Raises ProtocolError if an id is not 32 bytes long."""
    if any(len(item.id) != ID_BYTES for item in items):
        raise ProtocolError(f"ids: an item's id must have {ID_BYTES} bytes")
    lengths, data, refs = pack_blobs([item.payload for item in items])
    specs, index = spec_table([item.spec for item in items])
    return common_pb2.ItemBatch(
        first_seq=first_seq,
        ids=b"".join([item.id for item in items]),
        length=lengths,
        data=data,
        refs=refs,
        specs=specs,
        spec_index=index,
    )


def item_batch_from_wire(
    batch: common_pb2.ItemBatch,
) -> tuple[int, list[bytes], list[Blob], tuple[ItemSpec, ...], list[int] | None]:
    """Return (first_seq, ids, payloads, specs, spec_index); without an index all use specs[0]."""
    ids = split_ids(batch.ids)
    payloads = unpack_blobs(batch.length, batch.data, batch.refs)
    if len(payloads) != len(ids):
        raise ProtocolError(f"length: {len(payloads)} entries for {len(ids)} ids")
    _check_size("first_seq", batch.first_seq + len(ids))
    specs, index = spec_columns_from_wire(batch.specs, batch.spec_index, len(ids))
    return batch.first_seq, ids, payloads, specs, index


# ---- failures


def text_for_wire(text: str, limit: int = ERROR_TEXT_MAX) -> str:
    """Cut to `limit` characters, and replace lone surrogates, which protobuf rejects, by question marks."""
    return text[:limit].encode("utf-8", "replace").decode()


def failure_to_wire(index: int, failure: Failure) -> common_pb2.ErrorInfo:
    delay = failure.retry_after_ms
    return common_pb2.ErrorInfo(
        index=index,
        code=text_for_wire(failure.code, ERROR_CODE_MAX) or "attempt_failed",
        message=text_for_wire(failure.message),
        retryable=failure.retryable,
        worker_lost=failure.worker_lost,
        retry_after_ms=None if delay is None else min(max(0, int(delay)), RETRY_AFTER_MAX_MS),
    )


def failures_from_wire(errors: Iterable[common_pb2.ErrorInfo]) -> dict[int, Failure]:
    """Return failures by index into the group's arrays; the caller checks the range."""
    found: dict[int, Failure] = {}
    for error in errors:
        if error.index in found:
            raise ProtocolError(f"errors: entry {error.index} is named twice")
        if not error.code:
            raise ProtocolError(f"errors: entry {error.index} has no code")
        delay = min(error.retry_after_ms, RETRY_AFTER_MAX_MS) if error.HasField("retry_after_ms") else None
        found[error.index] = Failure(
            error.code[:ERROR_CODE_MAX], error.message[:ERROR_TEXT_MAX], error.retryable, error.worker_lost, delay
        )
    return found


# ---- workers


def inventory_to_wire(inventory: Inventory) -> common_pb2.Inventory:
    return common_pb2.Inventory(
        capacity=dict(inventory.capacity),
        roles=inventory.roles,
        labels=dict(inventory.labels),
        plugins=inventory.plugins,
        host=inventory.host,
        version=inventory.version,
        executors=inventory.executors,
        pid=inventory.pid,
        devices=inventory.devices,
    )


def inventory_from_wire(wire: common_pb2.Inventory) -> Inventory:
    return Inventory(
        capacity=_amounts("inventory.capacity", wire.capacity),
        roles=tuple(wire.roles),
        labels=tuple(sorted(wire.labels.items())),
        plugins=tuple(wire.plugins),
        host=wire.host,
        version=wire.version,
        executors=tuple(wire.executors),
        pid=wire.pid,
        devices=tuple(wire.devices),
    )


def credit_to_wire(credit: Credit) -> work_pb2.Credit:
    return work_pb2.Credit(items=credit.items, bytes=credit.bytes, run_items=dict(credit.run_items))


def credit_from_wire(wire: work_pb2.Credit) -> Credit:
    _check_size("credit.bytes", wire.bytes)
    for run_id in wire.run_items:
        if not is_ulid(run_id):
            raise ProtocolError(f"credit.run_items: {run_id!r} is not a run id")
    return Credit(wire.items, wire.bytes, tuple(sorted(wire.run_items.items())))


# ---- runs


def run_config(body: bytes) -> dict[str, Any]:
    """Parse a run's configuration; none is empty. Raises ProtocolError if it is no JSON object or nested too deeply."""
    try:
        value: Any = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"config: it is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ProtocolError("config: it is no JSON object")
    level: list[Any] = [value]
    for _ in range(CONFIG_DEPTH):
        level = [part for one in level for part in _parts(one)]
        if not level:
            return cast("dict[str, Any]", value)
    raise ProtocolError(f"config: it is nested more than {CONFIG_DEPTH} levels deep")


def _parts(value: Any) -> Iterable[Any]:
    """Return those members that may have members."""
    members: Iterable[Any] = cast("dict[str, Any]", value).values() if isinstance(value, dict) else value
    return [part for part in members if isinstance(part, dict | list)]


def run_spec_to_wire(spec: RunSpec) -> runs_pb2.RunSpec:
    return runs_pb2.RunSpec(
        run_id=spec.run_id,
        workload=spec.workload,
        name=spec.name,
        config=spec.config,
        order=spec.order.value,
        priority=spec.priority,
        max_in_flight=spec.max_in_flight,
        lanes=[runs_pb2.LaneConfig(name=lane.name, max_in_flight=lane.max_in_flight) for lane in spec.lanes],
        policies=[runs_pb2.Policy(name=policy.name, options=dict(policy.options)) for policy in spec.policies],
        pause_timeout_ms=spec.pause_timeout_ms,
        labels=dict(spec.labels),
        one_worker=spec.one_worker,
    )


def run_spec_from_wire(wire: runs_pb2.RunSpec) -> RunSpec:
    if not is_ulid(wire.run_id):
        raise ProtocolError(f"run_id: {wire.run_id!r} is not a ULID")
    if not wire.workload:
        raise ProtocolError("workload: it is empty")
    if wire.order not in set(Order):
        raise ProtocolError(f"order: {wire.order!r} is none of {', '.join(Order)}")
    names = [lane.name for lane in wire.lanes]
    if len(set(names)) != len(names):
        raise ProtocolError("lanes: a name is there twice")
    for name in names:
        check_name("lanes", name)
    if any(not policy.name for policy in wire.policies):
        raise ProtocolError("policies: one has no name")
    _check_size("pause_timeout_ms", wire.pause_timeout_ms)
    return RunSpec(
        run_id=wire.run_id,
        workload=wire.workload,
        config=wire.config,
        name=wire.name,
        order=Order(wire.order),
        priority=wire.priority,
        max_in_flight=wire.max_in_flight,
        lanes=tuple(Lane(lane.name, lane.max_in_flight) for lane in wire.lanes),
        policies=tuple(Policy(p.name, tuple(sorted(p.options.items()))) for p in wire.policies),
        pause_timeout_ms=wire.pause_timeout_ms,
        labels=tuple(sorted(wire.labels.items())),
        one_worker=wire.one_worker,
    )
