"""What one transaction writes, flattened to rows of columns; the adapters only push them through."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

from rollout.model.item import Blob

from rollout_coordinator.core.step import ItemRows, ResultRows, Writes
from rollout_coordinator.ledger import queries, rows
from rollout_coordinator.ledger.queries import Bulk

_NO_FAILURE = (None, None, None)


def bulks(writes: Writes) -> Iterator[tuple[Bulk, list[tuple[Any, ...]]]]:
    """Inserts and upserts in an order that needs no deferred checks; tables without rows are left out."""
    retired = frozenset(writes.retired)  # given and over within this very transaction: never written
    parts: list[tuple[Bulk, Iterable[Sequence[Any]]]] = [
        (queries.RUNS, map(rows.run_columns, writes.runs.values())),
        (queries.LOGS, map(rows.log_columns, writes.logs.values())),
        (queries.LANES, map(rows.lane_columns, writes.lanes.values())),
        (queries.SPECS, ((s.run_id, s.index, rows.spec_json(s.spec)) for s in writes.specs)),
        (queries.WORKERS, map(rows.worker_columns, writes.workers.values())),
        (queries.ITEMS, (row for group in writes.items for row in item_columns(group))),
        (queries.RESULTS, (row for group in writes.results for row in result_columns(group))),
        (queries.ASSIGNMENTS, (
            (a.batch, rows.clean(a.worker), a.at_ms, sum(len(k.seq) for k in a.keys), rows.pack_keys(a.keys))
            for a in writes.assignments if a.batch not in retired
        )),
        (queries.ATTEMPTS, map(rows.attempt_columns, writes.attempts)),
    ]  # fmt: skip
    for bulk, found in parts:
        values = [tuple(row) for row in found]
        if values:
            yield bulk, values


def _blobs(blobs: list[Blob]) -> Iterable[tuple[Any, Any, Any, Any]]:
    return map(rows.blob_columns, blobs)


def item_columns(group: ItemRows) -> Iterator[tuple[Any, ...]]:
    seqs = range(group.first_seq, group.first_seq + len(group.ids))
    for seq, item_id, spec, blob in zip(seqs, group.ids, group.spec, _blobs(group.payloads), strict=True):
        yield group.log, seq, item_id, spec, *blob


def result_columns(group: ResultRows) -> Iterator[tuple[Any, ...]]:
    failures, worker, log, accepted_ms = group.failures, rows.clean(group.worker), group.log, group.accepted_ms
    columns = zip(
        group.seq, group.attempt, group.outcome, _blobs(group.data), group.duration_ms, group.units_in, group.units_out,
        group.position if group.position is not None else repeat(None, len(group.seq)), strict=True,
    )  # fmt: skip
    for index, (seq, attempt, outcome, blob, duration, units_in, units_out, position) in enumerate(columns):
        failure = rows.failure_columns(failures[index]) if index in failures else _NO_FAILURE
        yield (
            log, seq, attempt, int(outcome), *blob, *failure, worker, rows.clamp(duration), rows.clamp(units_in),
            rows.clamp(units_out), accepted_ms, position,
        )  # fmt: skip
