"""The database: a deliberately simple second implementation of the ledger's tables, shared by all coordinators.

`Tables` holds the rows and applies a transaction the way the SQL would. `StoreLedger` is one coordinator's connection:
the production `Ledger` port with latency, and faults that `Faults` switches on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from rollout.model.errors import FencedError, StorageFullError, StorageUnavailableError
from rollout.model.item import Failure, Outcome
from rollout.model.run import ENDED, Order
from rollout_coordinator.core.events import IdsLoaded, Loaded, PendingItem, ResultsLoaded
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
from rollout_coordinator.ledger.port import CommitPage, Fence, LeaseRow
from sim_loop import NodeLoop, Scheduler


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
        self.runs.update({run_id: copy.copy(row) for run_id, row in w.runs.items()})
        for log, row in w.logs.items():
            self.logs[log] = copy.copy(row)
            self.next_log = max(self.next_log, log + 1)
        self.lanes.update({key: copy.copy(row) for key, row in w.lanes.items()})
        for spec in w.specs:
            self.specs.setdefault((spec.run_id, spec.index), spec)
        self.workers.update({name: copy.copy(row) for name, row in w.workers.items()})
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
        return PendingItem(seq, item, spec, payload, max(history), failures, losses, not_before)

    def counted(self, log: int, seq: int) -> tuple[int, int]:
        history = self.attempts.get((log, seq), {}).values()
        failures = sum(a.end in ("failed", "timeout") for a in history)
        return failures, sum(a.end == "worker_lost" for a in history)

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
        logs = [copy.copy(row) for row in self.logs.values() if row.run_id in live and not self._over(row)]
        return Snapshot(
            runs=[copy.copy(row) for row in live.values()],
            logs=logs,
            lanes=[copy.copy(row) for key, row in sorted(self.lanes.items()) if key[0] in live],
            specs=[row for key, row in sorted(self.specs.items()) if key[0] in live],
            accepted={row.log: found for row in logs if (found := self._ranges(row))},
        )

    def snapshot(self) -> Snapshot:
        snapshot = self._of_runs({i: row for i, row in self.runs.items() if row.state not in ENDED})
        snapshot.workers = [copy.copy(w) for w in self.workers.values() if w.ended_ms == 0]
        snapshot.next_log, snapshot.next_batch = self.next_log, self.next_batch
        live = {row.log for row in snapshot.logs}
        found = sorted((g.batch, key, g) for key, g in self.given.items() if key[0] in live)
        for batch, (log, seq), given in found:
            spec = self.items[log][seq][2]
            failures, losses = self.counted(log, seq)
            snapshot.open_attempts.append(
                OpenAttempt(log, seq, given.attempt, given.worker, batch, spec, failures, losses)
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
        page = CommitPage(cursor, [], [], [], [], {}, [], [], [], [], [], [], [])
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
        return rows.run_view(copy.copy(row), self.logs.get(row.root_log), lanes)


@dataclass(slots=True)
class Faults:
    """What is wrong with one coordinator's way to the database. The scenario sets these."""

    unreachable: bool = False
    fail: int = 0  # so many commits fail, nothing written
    torn: int = 0  # so many commits lose their answer
    late: int = 0  # so many commits are given up by the client and applied by the server afterwards
    slow: float = 0.0  # seconds a commit takes


class Store:
    """The database server. `committed(who, fence, writes)` hears of each transaction as it becomes durable."""

    def __init__(self, scheduler: Scheduler, random: Random, ttl: float) -> None:
        self.tables = Tables()
        self.loop = scheduler.loop("store")
        self.random = random
        self.ttl = ttl
        self.full = False
        self.latency = 0.001
        self.locked_until = 0.0  # a transaction that was given up holds the row of the lease
        self.before: Callable[[str, Fence, Writes], None] = lambda who, fence, writes: None
        self.committed: Callable[[str, Fence, Writes], None] = lambda who, fence, writes: None
        self.count: Callable[[str], None] = lambda what: None

    def fence_holds(self, fence: Fence) -> bool:
        """UPDATE lease SET batch = batch + 1 WHERE epoch = :epoch AND batch = :batch."""
        row = self.tables.lease
        return row is not None and (row.epoch, row.batch) == (fence.epoch, fence.batch)

    def check(self, fence: Fence) -> None:
        if not self.fence_holds(fence):
            raise FencedError(f"the lease is no longer at epoch {fence.epoch}, batch {fence.batch}: nothing written")

    def commit(self, who: str, fence: Fence, writes: Writes) -> None:
        self.check(fence)
        row = self.tables.lease
        assert row is not None
        self.before(who, fence, writes)
        self.tables.lease = LeaseRow(row.holder, row.epoch, row.batch + 1, row.beat, row.released, row.address)
        self.tables.apply(writes)
        self.committed(who, fence, writes)

    def swap(self, old: LeaseRow, new: LeaseRow) -> bool:
        if self.tables.lease != old:
            return False
        self.tables.lease = new
        return True

    def insert(self, row: LeaseRow) -> bool:
        if self.tables.lease is not None:
            return False
        self.tables.lease = row
        return True

    def renew(self, holder: str, epoch: int) -> bool:
        row = self.tables.lease
        if row is None or (row.holder, row.epoch, row.released) != (holder, epoch, False):
            return False
        self.tables.lease = LeaseRow(row.holder, row.epoch, row.batch, row.beat + 1, False, row.address)
        return True


class StoreLedger:
    """The production `Ledger` port of one coordinator process."""

    def __init__(self, store: Store, loop: NodeLoop, faults: Faults) -> None:
        self._store = store
        self._loop = loop
        self._faults = faults
        self._dead_batches: list[int] = []

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def _call(self, act: Callable[[], Any], *, slow: float = 0.0, lose: str = "", writes: bool = False) -> Any:
        """`act` at the server, its value or error back here. `lose`: "request" or "answer"."""
        store, loop = self._store, self._loop
        scheduler = store.loop.scheduler
        if self._faults.unreachable and not lose:
            store.count("store_unreachable")
            lose = "answer" if store.random.random() < 0.3 else "request"
        future = loop.create_future()
        due = scheduler.now + store.latency * (0.5 + store.random.random()) + slow
        if writes and due < store.locked_until:
            due = store.locked_until + store.latency
            if due - scheduler.now > store.ttl / 3:  # lock_timeout
                lose = "request"

        def answer(error: BaseException | None, value: Any) -> None:
            if not future.done():
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(value)

        def serve() -> None:
            error: BaseException | None = None
            value: Any = None
            try:
                value = act()
            except (FencedError, StorageFullError, StorageUnavailableError) as failed:
                error = failed
            if lose != "answer" or error is not None:  # COMMIT was not reached
                scheduler.at(scheduler.now + store.latency, loop, answer, error, value)

        if lose != "request":
            scheduler.at(due, store.loop, serve)
        if lose:
            timeout = StorageUnavailableError("the database does not answer")
            loop.call_later(store.ttl / 3, answer, timeout, None)
        return await future

    # ---- lease

    async def read_lease(self) -> LeaseRow | None:
        return await self._call(lambda: self._store.tables.lease)

    async def insert_lease(self, row: LeaseRow) -> bool:
        return await self._call(lambda: self._store.insert(row), writes=True)

    async def swap_lease(self, old: LeaseRow, new: LeaseRow) -> bool:
        return await self._call(lambda: self._store.swap(old, new), writes=True)

    async def renew_lease(self, holder: str, epoch: int) -> bool:
        return await self._call(lambda: self._store.renew(holder, epoch), writes=True)

    # ---- the one writer

    async def commit(self, fence: Fence, writes: Writes) -> None:
        """An unknown outcome is resolved as the Postgres adapter does: by reading `batch`, or not at all."""
        store, faults = self._store, self._faults
        dead, self._dead_batches = self._dead_batches, []
        writes.retired.extend(dead)
        if store.full:
            store.count("store_full")
            raise StorageFullError("the database is full")
        if faults.fail:
            faults.fail -= 1
            store.count("failed_commit")
            raise StorageUnavailableError("the transaction failed: nothing was written")

        def act() -> None:
            store.commit(self._loop.name, fence, writes)

        slow = faults.slow
        if slow:
            store.count("slow_commit")
        if faults.late:
            faults.late -= 1
            await self._begin(fence, act, store.ttl * (0.2 + store.random.random()))
            store.count("late_commit")
            raise StorageUnavailableError("no answer to COMMIT")
        if not faults.torn:
            await self._call(act, slow=slow, writes=True)
            return
        faults.torn -= 1
        await self._begin(fence, act if store.random.random() < 0.6 else None, 0.02)
        store.count("torn_commit")
        row = await self._call(lambda: store.tables.lease, writes=True)  # FOR UPDATE: waits for one under way
        if row is None or (row.epoch, row.batch) != (fence.epoch, fence.batch + 1):
            raise StorageUnavailableError("the connection broke at COMMIT: nothing was written")

    async def _begin(self, fence: Fence, act: Callable[[], None] | None, seconds: float) -> None:
        """The fence held, so the server keeps that row locked until it commits or rolls back; COMMIT has no answer."""
        store = self._store
        scheduler = store.loop.scheduler

        def locked() -> None:
            store.check(fence)
            store.locked_until = scheduler.now + seconds
            if act is not None:
                scheduler.at(store.locked_until, store.loop, act)

        await self._call(locked, writes=True)

    async def purge(self, limit: int) -> int:
        return 0

    # ---- reads

    async def snapshot(self) -> Snapshot:
        snapshot: Snapshot = await self._call(self._store.tables.snapshot)
        used = {attempt.batch for attempt in snapshot.open_attempts}
        self._dead_batches = [batch for batch in self._store.tables.batches if batch not in used]
        return snapshot

    async def run_snapshot(self, run_id: str) -> Snapshot | None:
        return await self._call(lambda: self._store.tables.run_snapshot(run_id))

    async def pending(self, load: LoadPending) -> Loaded:
        return await self._call(lambda: self._store.tables.pending(load))

    async def items(self, load: LoadItems) -> Loaded:
        return await self._call(lambda: self._store.tables.of_items(load))

    async def ids(self, load: LoadIds) -> IdsLoaded:
        return await self._call(lambda: self._store.tables.ids(load))

    async def results(self, load: LoadResults) -> ResultsLoaded:
        return await self._call(lambda: self._store.tables.of_results(load))

    async def commit_log(self, log: int, cursor: int, limit: int, max_bytes: int, payloads: bool) -> CommitPage:
        return await self._call(lambda: self._store.tables.commit_log(log, cursor, limit, payloads))

    async def run_view(self, run_id: str) -> RunView | None:
        return await self._call(lambda: self._store.tables.run_view(run_id))

    async def run_views(self, states: tuple[str, ...], limit: int) -> list[RunView]:
        tables = self._store.tables
        found = [r for r in tables.runs if not states or str(tables.runs[r].state) in states]
        return [view for run_id in found[:limit] if (view := tables.run_view(run_id)) is not None]

    async def workers(self, limit: int) -> list[WorkerRow]:
        return list(self._store.tables.workers.values())[:limit]

    async def referenced(self, object_ids: list[bytes]) -> set[bytes]:
        return set()

    async def run_objects(self, run_id: str) -> set[bytes]:
        return set()
