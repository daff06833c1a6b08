"""The tables of the ledger as plain dicts: a second, simple implementation, and what is read of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, TypeVar

from rollout.model.item import Failure, Outcome
from rollout.model.run import ENDED, Order
from rollout.model.worker import WorkerState
from rollout_coordinator.core.events import IdsLoaded, Loaded, PendingItem, ResultsLoaded
from rollout_coordinator.core.settings import QUARANTINED_MAX
from rollout_coordinator.core.step import (
    LoadIds,
    LoadItems,
    LoadPending,
    LoadResults,
    LogRow,
    OpenAttempt,
    RunRow,
    Snapshot,
    WorkerRow,
    Writes,
)
from rollout_coordinator.core.views import RunView
from rollout_coordinator.ledger import rows
from rollout_coordinator.ledger.port import CommitPage, LeaseRow

QUARANTINED = WorkerState.QUARANTINED
T = TypeVar("T")
_values: dict[type, Callable[[Any], tuple[Any, ...]]] = {}


def copied(row: T) -> T:
    """As `copy.copy`, of a row (a dataclass with several fields, all of them parameters)."""
    kind: Any = type(row)
    values = _values.get(kind)
    if values is None:
        values = _values[kind] = attrgetter(*[field.name for field in fields(kind)])
    return kind(*values(row))


@dataclass(slots=True)
class Result:
    attempt: int
    outcome: Outcome
    data: Any
    failure: Failure | None
    duration_ms: int
    accepted_ms: int
    worker: str
    position: int  # of arrival; -1: in schedule order


@dataclass(slots=True)
class Given:
    """An assignment that has neither a result nor an ending."""

    worker: str
    batch: int
    attempt: int


@dataclass(slots=True)
class Tables:
    lease: LeaseRow | None = None
    runs: dict[str, RunRow] = field(default_factory=dict[str, RunRow])
    logs: dict[int, LogRow] = field(default_factory=dict[int, LogRow])
    lanes: dict[tuple[str, str], Any] = field(default_factory=dict[tuple[str, str], Any])
    specs: dict[tuple[str, int], Any] = field(default_factory=dict[tuple[str, int], Any])
    items: dict[int, list[tuple[bytes, Any, int]]] = field(default_factory=dict[int, list[tuple[bytes, Any, int]]])
    results: dict[int, dict[int, Result]] = field(default_factory=dict[int, dict[int, Result]])
    places: dict[int, dict[int, int]] = field(default_factory=dict[int, dict[int, int]])  # arrival: position -> seq
    given: dict[tuple[int, int], Given] = field(default_factory=dict[tuple[int, int], Given])  # open ones
    last: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])  # newest attempt ever given
    batches: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict[int, list[tuple[int, int, int]]])
    attempts: dict[tuple[int, int], dict[int, Any]] = field(default_factory=dict[tuple[int, int], dict[int, Any]])
    workers: dict[str, WorkerRow] = field(default_factory=dict[str, WorkerRow])
    next_batch: int = 1
    next_log: int = 1

    # ---- the transaction

    def apply(self, w: Writes) -> None:
        self.runs.update({run_id: copied(row) for run_id, row in w.runs.items()})
        for log, row in w.logs.items():
            self.logs[log] = copied(row)
            self.next_log = max(self.next_log, log + 1)
        self.lanes.update({key: copied(row) for key, row in w.lanes.items()})
        for spec in w.specs:
            self.specs.setdefault((spec.run_id, spec.index), spec)
        self.workers.update({name: copied(row) for name, row in w.workers.items()})
        for group in w.items:
            self.items.setdefault(group.log, []).extend(zip(group.ids, group.payloads, group.spec, strict=True))
        for row in w.assignments:
            self.next_batch = max(self.next_batch, row.batch + 1)
            batch = self.batches[row.batch] = []
            for keys in row.keys:
                for seq, attempt in zip(keys.seq, keys.attempt, strict=True):
                    batch.append((keys.log, seq, attempt))
                    self.given[keys.log, seq] = Given(row.worker, row.batch, attempt)
                    self.last[keys.log, seq] = attempt
        for a in w.attempts:
            self.attempts.setdefault((a.log, a.seq), {}).setdefault(a.attempt, a)
            given = self.given.get((a.log, a.seq))
            if given is not None and given.attempt == a.attempt:
                del self.given[a.log, a.seq]
        for r in w.results:
            table = self.results.setdefault(r.log, {})
            for i, seq in enumerate(r.seq):
                position = r.position[i] if r.position is not None else -1
                table[seq] = Result(
                    r.attempt[i], r.outcome[i], r.data[i], r.failures.get(i), r.duration_ms[i], r.accepted_ms,
                    r.worker, position,
                )  # fmt: skip
                if position >= 0:
                    self.places.setdefault(r.log, {})[position] = seq
                self.given.pop((r.log, seq), None)
        for log, seq, _ in w.prune:
            self.results[log][seq].outcome = Outcome.SKIPPED
        for batch in w.retired:
            self.batches.pop(batch, None)
        for run_id in w.deleted_runs:
            self._delete(run_id)

    def _delete(self, run_id: str) -> None:
        dead = [n for n, row in self.logs.items() if row.run_id == run_id]
        for log in dead:
            del self.logs[log]
            self.items.pop(log, None)
            self.results.pop(log, None)
        self.given = {key: g for key, g in self.given.items() if key[0] not in dead}
        self.runs.pop(run_id, None)

    # ---- reads

    def item(self, log: int, seq: int) -> PendingItem:
        item, payload, spec = self.items[log][seq]
        history = self.attempts.get((log, seq))
        if not history:
            return PendingItem(seq, item, spec, payload)
        failures, losses = self.counted(log, seq)
        not_before = max(a.not_before_ms for a in history.values())
        delay = max((a.not_before_ms - a.at_ms for a in history.values() if a.not_before_ms), default=0)
        last = self.last_failure(log, seq)
        return PendingItem(seq, item, spec, payload, max(history), failures, losses, not_before, delay, *last)

    def counted(self, log: int, seq: int) -> tuple[int, int]:
        history = self.attempts.get((log, seq), {}).values()
        failures = sum(a.end in ("failed", "timeout") for a in history)
        return failures, sum(a.end == "worker_lost" for a in history)

    def last_failure(self, log: int, seq: int) -> tuple[str, str]:
        """(worker, code)"""
        history = self.attempts.get((log, seq), {})
        failed = [a for _, a in sorted(history.items()) if a.end in ("failed", "timeout")]
        return (failed[-1].worker, failed[-1].code) if failed else ("", "")

    def arrival(self, log: LogRow) -> bool:
        return not log.parent_log and self.runs[log.run_id].spec.order is Order.ARRIVAL

    def _ranges(self, log: LogRow) -> list[tuple[int, int]]:
        start = 0 if self.arrival(log) else log.cursor
        ranges: list[tuple[int, int]] = []
        for seq in sorted(s for s in self.results.get(log.log, ()) if s >= start):
            if ranges and ranges[-1][1] == seq - 1:
                ranges[-1] = (ranges[-1][0], seq)
            else:
                ranges.append((seq, seq))
        return ranges

    def _over(self, log: LogRow) -> bool:
        """A child log that nobody asks for any more."""
        done = log.parent_log and log.parent_seq in self.results.get(log.parent_log, ())
        return bool(done) and log.cursor >= log.submitted

    def _of_runs(self, live: dict[str, RunRow]) -> Snapshot:
        logs = [copied(row) for row in self.logs.values() if row.run_id in live and not self._over(row)]
        return Snapshot(
            runs=[copied(row) for row in live.values()],
            logs=logs,
            lanes=[copied(row) for key, row in sorted(self.lanes.items()) if key[0] in live],
            specs=[row for key, row in sorted(self.specs.items()) if key[0] in live],
            accepted={row.log: found for row in logs if (found := self._ranges(row))},
            won=[won for row in logs if not row.parent_log for won in self._won(row)],
        )

    def _won(self, log: LogRow) -> list[tuple[int, int, int]]:
        first: dict[int, int] = {}
        if any(run_id == log.run_id and row.spec.group for (run_id, _), row in self.specs.items()):
            for seq, result in sorted(self.results.get(log.log, {}).items()):
                if result.outcome is Outcome.DONE and (seq < log.cursor or self.arrival(log)):
                    first.setdefault(self.items[log.log][seq][2], seq)
        return [(log.log, spec, seq) for spec, seq in first.items()]

    def snapshot(self) -> Snapshot:
        snapshot = self._of_runs({i: row for i, row in self.runs.items() if row.state not in ENDED or row.survivors})
        out = sorted(
            (w for w in self.workers.values() if w.state is QUARANTINED), key=lambda w: (w.ended_ms, w.incarnation)
        )
        living = [w for w in self.workers.values() if w.ended_ms == 0]
        snapshot.workers = [copied(w) for w in (*living, *out[-QUARANTINED_MAX:])]
        snapshot.next_log, snapshot.next_batch = self.next_log, self.next_batch
        live = {row.log for row in snapshot.logs}
        found = sorted((g.batch, key, g) for key, g in self.given.items() if key[0] in live)
        for batch, (log, seq), given in found:
            spec = self.items[log][seq][2]
            failures, losses = self.counted(log, seq)
            snapshot.open_attempts.append(
                OpenAttempt(
                    log, seq, given.attempt, given.worker, batch, spec, failures, losses, *self.last_failure(log, seq)
                )
            )
        return snapshot

    def run_snapshot(self, run_id: str) -> Snapshot | None:
        row = self.runs.get(run_id)
        return None if row is None else self._of_runs({run_id: row})

    def pending(self, load: LoadPending) -> Loaded:
        items, table = self.items.get(load.log, []), self.results.get(load.log, {})
        found: list[PendingItem] = []
        room = load.max_bytes
        next_seq, end = load.from_seq, True
        for seq in range(load.from_seq, len(items)):
            if seq in table:
                continue
            room -= len(items[seq][1])
            if len(found) >= load.limit or (room < 0 and found):
                end = False
                break
            found.append(self.item(load.log, seq))
            next_seq = seq + 1
        if end:
            next_seq = max(next_seq, len(items))
        return Loaded(load.load_id, load.log, found, next_seq, end)

    def of_items(self, load: LoadItems) -> Loaded:
        rows = self.items.get(load.log, [])
        found = [self.item(load.log, seq) for seq in sorted(load.seqs) if seq < len(rows)]
        return Loaded(load.load_id, load.log, found, 0, False)

    def ids(self, load: LoadIds) -> IdsLoaded:
        found = self.items.get(load.log, [])[load.first_seq : load.first_seq + load.count]
        return IdsLoaded(load.load_id, load.log, load.first_seq, [row[0] for row in found])

    def of_results(self, load: LoadResults) -> ResultsLoaded:
        table, items = self.results.get(load.log, {}), self.items.get(load.log, [])
        seqs = [s for s in range(load.first_seq, load.first_seq + load.limit) if s in table]
        found = [table[s] for s in seqs]
        return ResultsLoaded(
            load.load_id, load.log, load.first_seq, seqs, [r.outcome for r in found], [items[s][2] for s in seqs],
            [r.data if load.with_data else b"" for r in found],
            {i: r.failure for i, r in enumerate(found) if r.failure is not None}, [r.attempt for r in found],
        )  # fmt: skip

    def commit_log(self, log: int, cursor: int, limit: int, payloads: bool) -> CommitPage:
        page = CommitPage(cursor, [], [], [], [], {}, [], [], [], [], [], [], [], [])
        row = self.logs.get(log)
        if row is None:
            return page
        table, items, places = self.results.get(log, {}), self.items.get(log, []), self.places.get(log)
        for position in range(cursor, min(row.cursor, cursor + limit)):
            seq = position if places is None else places[position]
            result = table[seq]
            if result.failure is not None:
                page.failures[len(page.seq)] = result.failure
            page.seq.append(seq)
            page.attempt.append(result.attempt)
            before = self.attempts.get((log, seq), {})
            begun = sum(one.began_ms > 0 for one in before.values())
            page.tries.append(begun + (result.attempt > 0 and result.attempt not in before))
            page.outcome.append(result.outcome)
            page.data.append(result.data)
            page.duration_ms.append(result.duration_ms)
            page.accepted_ms.append(result.accepted_ms)
            page.worker.append(result.worker)
            page.units_in.append(0)
            page.units_out.append(0)
            if payloads:
                page.ids.append(items[seq][0])
                page.payloads.append(items[seq][1])
        return page

    def run_view(self, run_id: str) -> RunView | None:
        row = self.runs.get(run_id)
        if row is None:
            return None
        lanes = [lane for key, lane in sorted(self.lanes.items()) if key[0] == run_id]
        return rows.run_view(copied(row), self.logs.get(row.root_log), lanes)
