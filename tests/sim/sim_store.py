"""The database: a deliberately simple second implementation of the ledger's tables, shared by all coordinators.

`Tables` (sim_tables) holds the rows and applies a transaction the way the SQL would. `StoreLedger` is one coordinator's connection:
the production `Ledger` port with latency, and faults that `Faults` switches on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from rollout.model.errors import FencedError, StorageFullError, StorageUnavailableError
from rollout_coordinator.core.events import IdsLoaded, Loaded, ResultsLoaded
from rollout_coordinator.core.step import (
    LoadIds,
    LoadItems,
    LoadPending,
    LoadResults,
    Snapshot,
    WorkerRow,
    Writes,
)
from rollout_coordinator.core.views import RunView
from rollout_coordinator.ledger.port import (
    CommitPage,
    EventRow,
    EventsOf,
    Fence,
    FoundRun,
    LeaseRow,
    LetGoRow,
    NewEvent,
    NewOutput,
    OutputRow,
)
from sim_loop import NodeLoop, Scheduler
from sim_tables import Tables


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

    async def forget_workers(self, before_ms: int, limit: int) -> int:
        return 0  # a seed has no weeks

    async def trim_output(self, most: int) -> list[tuple[str, int]]:
        return []

    async def record(self, epoch: int, outputs: list[NewOutput], events: list[NewEvent]) -> None:
        pass  # nobody reads it in the simulation

    async def output(self, run_id: str, after: int, max_bytes: int) -> list[OutputRow]:
        return []

    async def events(self, of: EventsOf, after: int, limit: int) -> list[EventRow]:
        return []

    async def newest_events(self, of: EventsOf, limit: int) -> list[EventRow]:
        return []

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

    async def find_runs(self, text: str, *, complete: bool, limit: int) -> list[FoundRun]:
        raise NotImplementedError("nobody types in the simulation")

    async def workers(self, limit: int) -> list[WorkerRow]:
        return list(self._store.tables.workers.values())[:limit]

    async def referenced(self, object_ids: list[bytes]) -> set[bytes]:
        return set()

    async def to_free(self, limit: int) -> list[LetGoRow]:
        return []  # results of the simulation name nothing

    async def run_objects(self, run_id: str) -> set[bytes]:
        return set()
