"""Converts the writes of a transaction to columns, which the adapters insert."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rollout.model.item import Blob, ObjectSlice

from rollout_coordinator.core.step import HELD, ItemRows, ResultRows, Writes
from rollout_coordinator.ledger import queries, rows
from rollout_coordinator.ledger.queries import Bulk

Columns = Mapping[str, Sequence[Any]]
"""Columns by name. A missing column is NULL, or has its default, in every row."""


def bulks(writes: Writes) -> Iterator[tuple[Bulk, list[Sequence[Any]]]]:
    """Yield inserts and upserts in an order that needs no deferred checks, without empty tables.

    Each comes with its columns, all of one length. Empty columns of items and results are left out: binding a NULL
    costs as much as binding a value, and most of these are NULL in nearly every row.
    """
    retired = frozenset(writes.retired)  # given and over within this very transaction: never written
    before: list[tuple[Bulk, Iterable[Sequence[Any]]]] = [
        (queries.RUNS, map(rows.run_columns, writes.runs.values())),
        (queries.LOGS, map(rows.log_columns, writes.logs.values())),
        (queries.LANES, map(rows.lane_columns, writes.lanes.values())),
        (queries.SPECS, ((s.run_id, s.index, rows.spec_json(s.spec)) for s in writes.specs)),
        (queries.WORKERS, map(rows.worker_columns, writes.workers.values())),
    ]
    after: list[tuple[Bulk, Iterable[Sequence[Any]]]] = [
        (queries.ASSIGNMENTS, (
            (a.batch, rows.clean(a.worker), a.at_ms, sum(len(k.seq) for k in a.keys), rows.pack_keys(a.keys))
            for a in writes.assignments if a.batch not in retired
        )),
        (queries.ATTEMPTS.only(_PLAIN), (
            rows.attempt_columns(a)[: len(_PLAIN)] for a in writes.attempts if not a.left
        )),
        (queries.ATTEMPTS, (rows.attempt_columns(a) for a in writes.attempts if a.left)),
        (queries.KEPT, _kept(writes)),
    ]  # fmt: skip
    yield from _turned(before)
    yield from _joined(queries.ITEMS, map(item_columns, writes.items))
    yield from _joined(queries.RESULTS, map(result_columns, writes.results))
    yield from _turned(after)


_PLAIN = queries.ATTEMPTS.columns[: queries.ATTEMPTS.columns.index("units_in")]
"""Columns of an attempt that left no evidence."""


def _kept(writes: Writes) -> list[Sequence[Any]]:
    """Return each object of an item once, as its result's if the result names it too."""
    named = {(one.log, one.seq, one.object_id): (HELD, 0, one.worker) for one in writes.held}
    named |= {(a.log, a.seq, object_id): (a.attempt, 0, "") for a in writes.attempts for object_id in a.left.keeps}
    for group in writes.results:
        for index, ids in group.keeps.items():
            for behind, object_id in enumerate(reversed(ids)):
                state = queries.SPARED if behind < group.spared else 0
                named[group.log, group.seq[index], object_id] = (0, state, "")
    return [(*key, *columns) for key, columns in named.items()]


def _turned(parts: list[tuple[Bulk, Iterable[Sequence[Any]]]]) -> Iterator[tuple[Bulk, list[Sequence[Any]]]]:
    for bulk, found in parts:
        columns: list[Sequence[Any]] = list(zip(*found, strict=True))
        if columns:
            yield bulk, columns


def _joined(bulk: Bulk, groups: Iterable[Columns]) -> Iterator[tuple[Bulk, list[Sequence[Any]]]]:
    """Concatenate groups with the same columns: one insert, or a few if columns differ."""
    alike: dict[tuple[str, ...], dict[str, list[Any]]] = {}
    for group in groups:
        into = alike.setdefault(tuple(group), {name: [] for name in group})
        for name, values in group.items():
            into[name] += values
    for names, columns in alike.items():
        if columns["seq"]:
            yield bulk.only(names), list(columns.values())


def item_columns(group: ItemRows) -> Columns:
    n = len(group.ids)
    if not n == len(group.payloads) == len(group.spec):
        raise ValueError(f"items of log {group.log}: columns of different lengths")
    return {
        "log": [group.log] * n,
        "seq": range(group.first_seq, group.first_seq + n),
        "id": group.ids,
        "spec": group.spec,
        **_blobs("payload", group.payloads),
    }


def result_columns(group: ResultRows) -> Columns:
    n = len(group.seq)
    columns: dict[str, Sequence[Any]] = {
        "log": [group.log] * n,
        "seq": group.seq,
        "attempt": group.attempt,
        "outcome": [int(outcome) for outcome in group.outcome],
        "worker": [rows.clean(group.worker)] * n,
        "duration_ms": _counts(group.duration_ms),
        "units_in": _counts(group.units_in),
        "units_out": _counts(group.units_out),
        "accepted_ms": [group.accepted_ms] * n,
        **_blobs("data", group.data),
    }
    if group.position is not None:
        columns["position"] = group.position
    if group.failures:
        failures = [rows.failure_columns(group.failures.get(index)) for index in range(n)]
        columns |= zip(("code", "message", "flags"), zip(*failures, strict=True), strict=True)
    if any(len(values) != n for values in columns.values()):
        raise ValueError(f"results of log {group.log}: columns of different lengths")
    return columns


def _blobs(inline: str, blobs: list[Blob]) -> Columns:
    if ObjectSlice not in set(map(type, blobs)):
        return {inline: blobs}
    names = (inline, "object_id", "object_offset", "object_length")
    return dict(zip(names, zip(*map(rows.blob_columns, blobs), strict=True), strict=True))


def _counts(values: list[int]) -> list[int]:
    """Clamp counts to 64-bit columns."""
    fits = not values or (rows.clamp(max(values)) == max(values) and rows.clamp(min(values)) == min(values))
    return values if fits else list(map(rows.clamp, values))
