"""The ledger in SQL: the statements of every call. The two databases differ in how they run a transaction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import wraps
from itertools import accumulate
from types import CoroutineType
from typing import Any, ClassVar, Concatenate, ParamSpec, Protocol, TypeVar

from rollout.model.errors import FencedError
from rollout.model.item import Outcome

from rollout_coordinator.core.events import IdsLoaded, Loaded, ResultsLoaded
from rollout_coordinator.core.settings import QUARANTINED_MAX
from rollout_coordinator.core.step import LoadIds, LoadItems, LoadPending, LoadResults, Snapshot, WorkerRow, Writes
from rollout_coordinator.core.views import RunView
from rollout_coordinator.ledger import queries, reads, rows
from rollout_coordinator.ledger.port import (
    EVENTS_KEPT,
    EVENTS_OF_RUN,
    OUTPUT_HEAD,
    OUTPUT_TAIL,
    AttemptAt,
    ChildLog,
    CommitPage,
    EventRow,
    EventsOf,
    FailureRow,
    Fence,
    FoundRun,
    ItemRecord,
    ItemStateRow,
    KeptRow,
    LeaseRow,
    LetGoRow,
    NewEvent,
    NewOutput,
    OutputRow,
    Seqs,
    Which,
)
from rollout_coordinator.ledger.queries import Bulk
from rollout_coordinator.ledger.reads import Row
from rollout_coordinator.ledger.writes import bulks

T = TypeVar("T")
P = ParamSpec("P")

TIDY_MS = 30_000
PAGE_ROWS = 2000
PAGE_BYTES = 1 << 20


class Transaction(Protocol):
    """An open transaction. `named` are the query's parameters; a list is a set, which the query has in braces."""

    async def fetch(self, query: str, **named: Any) -> Iterable[Row]:
        """Return the rows, to be read once and before the transaction ends."""
        ...

    async def execute(self, query: str, **named: Any) -> int:
        """Return the number of rows changed."""
        ...

    async def execute_each(self, query: str, many: Sequence[dict[str, Any]]) -> None: ...
    async def insert(self, parts: Iterable[tuple[Bulk, list[Sequence[Any]]]]) -> None: ...
    async def pass_fence(self, fence: Fence) -> bool: ...


Work = Callable[[Transaction], Coroutine[Any, Any, T]]


def _reading(
    work: Callable[Concatenate[Any, Transaction, P], CoroutineType[Any, Any, T]],
) -> Callable[Concatenate[Any, P], CoroutineType[Any, Any, T]]:
    """Run `work` in one read transaction."""

    @wraps(work)
    async def call(self: Ledger, *args: P.args, **named: P.kwargs) -> T:
        return await self.read(lambda db: work(self, db, *args, **named))

    return call


def _writing(
    work: Callable[Concatenate[Any, Transaction, P], CoroutineType[Any, Any, T]],
) -> Callable[Concatenate[Any, P], CoroutineType[Any, Any, T]]:
    """Run `work` in one transaction. Raises StorageUnavailableError if its outcome is unknown, or nothing was
    written."""

    @wraps(work)
    async def call(self: Ledger, *args: P.args, **named: P.kwargs) -> T:
        return await self.write(lambda db: work(self, db, *args, **named))

    return call


class Ledger(ABC):
    """The coordinator's durable store. There are two databases, with one schema and one conformance suite."""

    set_rows: ClassVar[int]
    """Maximum rows of a set passed at once."""
    fetch_rows: ClassVar[int]
    """Rows to fetch at once where there may be large ones."""
    free_lease: ClassVar[str] = ""
    """Statement to run before the lease is taken from another."""

    def __init__(self) -> None:
        self._dead_batches: list[int] = []

    @abstractmethod
    async def open(self) -> None:
        """Connect and migrate. Raises SchemaVersionError if the database is newer than this program."""

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def read(self, work: Work[T]) -> T: ...

    @abstractmethod
    async def write(self, work: Work[T], limit_ms: int | None = None) -> T:
        """Run `work` in a transaction. `limit_ms` is its time limit, where a database has one; None follows the lease's
        TTL."""

    # ---- lease

    @_reading
    async def read_lease(self, db: Transaction) -> LeaseRow | None:
        row = await _first(db, queries.READ_LEASE)
        return None if row is None else rows.lease_row(row)

    @_writing
    async def insert_lease(self, db: Transaction, row: LeaseRow) -> bool:
        """Insert the lease if there is none. Returns False if another process was faster."""
        return await db.execute(queries.INSERT_LEASE, **rows.lease_columns(row)) == 1

    @_writing
    async def swap_lease(self, db: Transaction, old: LeaseRow, new: LeaseRow) -> bool:
        # Whoever swaps from another holder has waited out its TTL, or found its word that it is gone.
        """Compare-and-swap over every field of `old`."""
        if self.free_lease and old.holder != new.holder:
            await db.execute(self.free_lease)
        columns = rows.lease_columns(new) | rows.lease_columns(old, "old_")
        return await db.execute(queries.SWAP_LEASE, **columns) == 1

    @_writing
    async def renew_lease(self, db: Transaction, holder: str, epoch: int) -> bool:
        """Increment `beat`, whatever `batch` is. Returns False for another epoch: fenced."""
        return await db.execute(queries.RENEW_LEASE, holder=holder, epoch=epoch) == 1

    # ---- the one writer

    async def commit(self, fence: Fence, writes: Writes) -> None:
        """Write all of `writes` in one transaction under `fence`, durable on return.

        An unknown outcome is resolved by reading `batch`. Raises FencedError if the lease moved, StorageFullError or
        StorageUnavailableError; in all cases nothing was written.
        """
        await self.write(self.committing(fence, writes))

    def committing(self, fence: Fence, writes: Writes) -> Work[None]:
        """Return the transaction of `commit`. It raises FencedError."""
        retired, self._dead_batches = [*writes.retired, *self._dead_batches], []

        async def work(db: Transaction) -> None:
            if not await db.pass_fence(fence):
                raise fence.lost()
            await db.insert(bulks(writes))
            if writes.prune:
                await db.execute(queries.PRUNE, outcome=int(Outcome.SKIPPED), given=writes.prune)
            for query, names, released in (
                (queries.LET_GO, ("log", "seq"), writes.released),
                (queries.LET_GO_OF_ATTEMPT, ("log", "seq", "attempt"), writes.released_attempts),
                (queries.LET_GO_OF_HELD, ("log", "seq", "object_id"), writes.released_held),
            ):
                await db.execute_each(query, [dict(zip(names, one, strict=True)) for one in released])
            if retired:
                await db.execute(queries.RETIRE, batches=retired)
            for run_id in writes.deleted_runs:
                await db.execute(queries.KEEP_NEXT_LOG)
                for query in (queries.MARK_PURGE, *queries.DELETE_RUN):
                    await db.execute(query, run_id=run_id)

        return work

    async def purge(self, limit: int) -> int:
        """Remove about `limit` rows of deleted runs, in a separate transaction, and return their number. For idle
        times."""
        return await self.write(lambda db: _purge(db, limit), TIDY_MS)

    async def forget_workers(self, before_ms: int, limit: int) -> int:
        """Remove up to `limit` rows of workers that ended before `before_ms` (unix time), and return their number."""
        return await self.write(lambda db: db.execute(queries.FORGET_WORKERS, before=before_ms, n=limit), TIDY_MS)

    # ---- history

    @_writing
    async def record(self, db: Transaction, epoch: int, outputs: list[NewOutput], events: list[NewEvent]) -> None:
        """Add to the history in a separate transaction, and drop what exceeds its limits.

        Output of a missing run is ignored. Raises FencedError for another epoch (nothing was written), or
        StorageUnavailableError if the outcome is unknown: it may be there, and may be recorded again.
        """
        await _check_epoch(db, epoch)
        by_run: dict[str, list[NewOutput]] = {}
        for output in outputs:
            by_run.setdefault(output.run_id, []).append(output)
        for run_id, of_run in by_run.items():
            if await _first(db, queries.IS_RUN, run_id=run_id) is not None:
                await _add_output(db, run_id, of_run)
        if events:
            last = await _value(db, queries.LAST_EVENT)
            numbers = range(last + 1, last + 1 + len(events))
            at_ms, names, levels, run_ids, fields = zip(*events, strict=True)
            columns: list[Sequence[Any]] = [numbers, at_ms, names, levels, run_ids, list(map(rows.clean, fields))]
            await db.insert([(queries.EVENTS, columns)])
            await db.execute(queries.CUT_EVENTS, last=numbers[-1] - EVENTS_KEPT)
            over = [{"run_id": run_id, "kept": EVENTS_OF_RUN} for run_id in dict.fromkeys(run_ids) if run_id]
            await db.execute_each(queries.CUT_EVENTS_OF_RUN, over)

    @_writing
    async def trim_output(self, db: Transaction, most: int) -> list[tuple[str, int]]:
        """Remove the output of whole runs, the oldest first, until all have `most` bytes, and return (run, bytes) of
        each. Readers see how much is missing."""
        gone = reads.output_over(list(await db.fetch(queries.OUTPUT_BY_RUN)), most)
        for run_id, _, last in gone:
            await db.execute(queries.DROP_OUTPUT, run_id=run_id, last=last)
            await db.execute(queries.EMPTY_OUTPUT, run_id=run_id, last=last, nothing=b"")
        return [(run_id, size) for run_id, size, _ in gone]

    @_reading
    async def output(self, db: Transaction, run_id: str, after: int, max_bytes: int) -> list[OutputRow]:
        """Return output in order, after position `after`; at least one row, if there is any."""
        found = await db.fetch(queries.OUTPUT_AFTER, run_id=run_id, after=after, n=reads.CHUNKS)
        return reads.output_rows(found, max_bytes)

    @_reading
    async def events(self, db: Transaction, of: EventsOf, after: int, limit: int) -> list[EventRow]:
        """Return events in order, after number `after`."""
        return [EventRow(*row) for row in await db.fetch(queries.EVENTS_AFTER, **reads.events_of(of, after, limit))]

    @_reading
    async def newest_events(self, db: Transaction, of: EventsOf, limit: int) -> list[EventRow]:
        """Return the newest events, in order."""
        found = [EventRow(*row) for row in await db.fetch(queries.NEWEST_EVENTS, **reads.events_of(of, 0, limit))]
        return found[::-1]

    # ---- replay

    async def snapshot(self) -> Snapshot:
        replay = await self.read(self._replay)
        self._dead_batches = replay.finish()
        return replay.snapshot

    async def _replay(self, db: Transaction) -> reads.Replay:
        replay = reads.Replay()
        snapshot = replay.snapshot
        snapshot.runs = [rows.run_row(row) for row in await db.fetch(queries.LIVE_RUNS)]
        replay.logs(await db.fetch(queries.LIVE_LOGS))
        snapshot.lanes = [rows.lane_row(row) for row in await db.fetch(queries.LIVE_LANES)]
        snapshot.specs = [rows.spec_row(row) for row in await db.fetch(queries.LIVE_SPECS)]
        snapshot.workers = [rows.worker_row(row) for row in await db.fetch(queries.LIVE_WORKERS)]
        out = await db.fetch(queries.QUARANTINED_WORKERS, n=QUARANTINED_MAX)
        snapshot.workers += [rows.worker_row(row) for row in out]
        await self._accepted(db, replay)
        replay.assignments(await db.fetch(queries.LIVE_ASSIGNMENTS))
        for at, chunk in replay.given(self.set_rows):
            replay.open(at, await db.fetch(queries.OPEN_ATTEMPTS, given=[row[:3] for row in chunk]))
        snapshot.next_log = await _value(db, queries.NEXT_LOG)
        snapshot.next_batch = await _value(db, queries.NEXT_BATCH)
        return replay

    @_reading
    async def run_snapshot(self, db: Transaction, run_id: str) -> Snapshot | None:
        """Return a run in any state, with its logs, lanes, specs and accepted ranges; no workers, no open attempts."""
        replay = reads.Replay()
        snapshot = replay.snapshot
        snapshot.runs = [rows.run_row(row) for row in await db.fetch(queries.RUN_BY_ID, run_id=run_id)]
        if not snapshot.runs:
            return None
        replay.logs(await db.fetch(queries.LOGS_OF_RUN, run_id=run_id))
        snapshot.lanes = [rows.lane_row(row) for row in await db.fetch(queries.LANES_OF_RUN, run_id=run_id)]
        snapshot.specs = [rows.spec_row(row) for row in await db.fetch(queries.SPECS_OF_RUN, run_id=run_id)]
        await self._accepted(db, replay)
        return snapshot

    async def _accepted(self, db: Transaction, replay: reads.Replay) -> None:
        """Read what was accepted beyond the cursors, and who won the groups."""
        wanted = replay.ranges_wanted()
        for at in range(0, len(wanted), self.set_rows):
            given = [(log, seq, 0) for log, seq in wanted[at : at + self.set_rows]]
            replay.ranges(await db.fetch(queries.ACCEPTED_RANGES, given=given))
        for grouped in replay.grouped():
            replay.won(grouped["log"], await db.fetch(queries.WON, **grouped))

    # ---- reads of the core

    @_reading
    async def pending(self, db: Transaction, load: LoadPending) -> Loaded:
        builder = reads.PendingBuilder(load, await _value(db, queries.LAST_SEQ, log=load.log))
        page = ahead = self.fetch_rows
        while not builder.complete:
            n, first, to = min(page, load.limit - builder.count), builder.next_seq, builder.next_seq + ahead
            found = await db.fetch(queries.PENDING, log=load.log, from_seq=first, to_seq=to, n=n)
            seen = builder.add(found, n, to)
            # Small rows: more at once, for each page waits for its turn. Large payloads: no more than now.
            page = max(self.fetch_rows, min(PAGE_BYTES // max(1, builder.mean_bytes), PAGE_ROWS))
            # Further at a time where most rows have results.
            ahead = page if seen == n else min(2 * ahead, self.set_rows)
        if builder.span is not None:
            first, last = builder.span
            tried = await db.fetch(queries.HISTORY_BETWEEN, log=load.log, from_seq=first, to_seq=last)
            reads.add_history(builder.loaded.items, tried)
        return builder.loaded

    @_reading
    async def items(self, db: Transaction, load: LoadItems) -> Loaded:
        found = await db.fetch(queries.ITEMS_AT, log=load.log, seqs=load.seqs)
        items = [reads.pending_item(row) for row in found]
        reads.add_history(items, await db.fetch(queries.HISTORY_AT, log=load.log, seqs=load.seqs))
        return Loaded(load.load_id, load.log, items, 0, False)

    @_reading
    async def ids(self, db: Transaction, load: LoadIds) -> IdsLoaded:
        to_seq = load.first_seq + load.count
        found = await db.fetch(queries.IDS, log=load.log, from_seq=load.first_seq, to_seq=to_seq)
        return IdsLoaded(load.load_id, load.log, load.first_seq, [bytes(row[0]) for row in found])

    @_reading
    async def results(self, db: Transaction, load: LoadResults) -> ResultsLoaded:
        to_seq = load.first_seq + load.limit
        found = await db.fetch(queries.RESULTS_BETWEEN, log=load.log, from_seq=load.first_seq, to_seq=to_seq)
        return reads.results_loaded(load, found)

    @_reading
    async def commit_log(
        self, db: Transaction, log: int, cursor: int, limit: int, max_bytes: int, payloads: bool
    ) -> CommitPage:
        """Return a page from position `cursor` up to the log's commit cursor; empty at its end."""
        builder = reads.PageBuilder(cursor, max_bytes, payloads)
        committed = await _value(db, queries.LOG_CURSOR, log=log)
        placed = await _value(db, queries.IS_PLACED, log=log)
        if committed is None or placed is None:
            return builder.page
        end, query = min(cursor + limit, committed), queries.commit_page(bool(placed), payloads)
        for at in range(cursor, end, self.fetch_rows):
            found = await db.fetch(query, log=log, from_pos=at, to_pos=min(at + self.fetch_rows, end))
            if not all(map(builder.add, found)):
                break
        return builder.page

    # ---- views for the service

    @_reading
    async def run_view(self, db: Transaction, run_id: str) -> RunView | None:
        """Return an ended run from its rows (in_flight and running are 0), or any other run with its stored
        counters."""
        row = await _first(db, queries.RUN_BY_ID, run_id=run_id)
        return None if row is None else await _run_view(db, row)

    @_reading
    async def run_views(self, db: Transaction, states: tuple[str, ...], limit: int) -> list[RunView]:
        """Return runs, the newest first; empty `states` means all."""
        found = await db.fetch(queries.NEWEST_RUNS, any_state=int(not states), states=list(states), n=limit)
        return [await _run_view(db, row) for row in list(found)]

    @_reading
    async def find_runs(self, db: Transaction, text: str, *, complete: bool, limit: int) -> list[FoundRun]:
        """Return runs whose id, or its short form, begins with `text`, or whose name is `text` (`complete`: begins with
        it), the newest first."""
        asked = rows.find_columns(text, complete=complete, limit=limit)
        return [FoundRun(*row) for row in await db.fetch(queries.FIND_RUNS, **asked)]

    @_reading
    async def workers(self, db: Transaction, limit: int) -> list[WorkerRow]:
        """Return workers, the newest first, including ended ones."""
        return [rows.worker_row(row) for row in await db.fetch(queries.NEWEST_WORKERS, n=limit)]

    @_reading
    async def workers_at(self, db: Transaction, incarnations: list[str]) -> list[WorkerRow]:
        """Return those of these workers that are (still) known."""
        return [rows.worker_row(row) for row in await db.fetch(queries.WORKERS_AT, workers=incarnations)]

    @_reading
    async def seqs(self, db: Transaction, log: int, which: Which, from_seq: int, limit: int) -> Seqs:
        """Return at most `limit` rows of a log from `from_seq` on, ascending."""
        last = await _value(db, queries.LAST_SEQ, log=log)
        end = 0 if last is None else last + 1
        if from_seq >= end:
            return Seqs([], end, True)
        if which is Which.ALL:
            to_seq = min(from_seq + limit, end)
            return Seqs(list(range(from_seq, to_seq)), to_seq, to_seq >= end)
        to_seq = from_seq + reads.OPEN_SPAN
        found = await db.fetch(reads.SEQS_OF[which], log=log, from_seq=from_seq, to_seq=to_seq, n=limit)
        return reads.seqs_found(which, [row[0] for row in found], limit, to_seq, end)

    @_reading
    async def item_states(self, db: Transaction, log: int, seqs: list[int]) -> list[ItemStateRow]:
        """Return states in order, without missing rows."""
        return [reads.item_state(row) for row in await db.fetch(queries.STATES_AT, log=log, seqs=seqs)]

    @_reading
    async def item(self, db: Transaction, log: int, seq: int, attempts: int) -> ItemRecord | None:
        """Return a row with at most `attempts` of its attempts that ended without ending it."""
        row = await _first(db, queries.ITEM_AT, log=log, seq=seq)
        if row is None:
            return None
        return reads.item_record(row, await db.fetch(queries.ATTEMPTS_AT, log=log, seq=seq, n=attempts))

    @_reading
    async def attempts(
        self, db: Transaction, log: int, after: tuple[int, int], limit: int, max_bytes: int
    ) -> list[AttemptAt]:
        """Return attempts that ended without ending their item, in order, after (seq, attempt); at least one, if there
        is any."""
        found = await db.fetch(queries.ATTEMPTS_AFTER, log=log, seq=after[0], attempt=after[1], n=limit)
        return reads.attempts_page(found, max_bytes)

    @_reading
    async def child_log(self, db: Transaction, log: int, seq: int) -> ChildLog | None:
        """Return the log of a row's children."""
        row = await _first(db, queries.CHILD_LOG, log=log, seq=seq)
        return None if row is None else ChildLog(*row)

    @_reading
    async def last_failures(self, db: Transaction, log: int, limit: int) -> list[FailureRow]:
        """Return rows that failed for good and attempts that failed or were lost, the newest first."""
        found = [
            row
            for query in (queries.LAST_FAILED, queries.LAST_FAILED_ATTEMPTS)
            for row in await db.fetch(query, log=log, n=limit)
        ]
        return reads.last_failures(found, limit)

    # ---- objects

    @_reading
    async def kept(self, db: Transaction, run_id: str) -> list[KeptRow]:
        """Return each object that a result of the run's own items, or a failed attempt, names, by seq and object."""
        return [KeptRow(*row) for row in await db.fetch(queries.KEPT_OF_RUN, run_id=run_id)]

    @_writing
    async def release(self, db: Transaction, epoch: int, run_id: str, seqs: list[int]) -> None:
        """Release what the results of these items, and their attempts, name, so that it is freed. Raises FencedError if
        `epoch` is over."""
        await _check_epoch(db, epoch)
        await db.execute_each(queries.LET_GO_OF_RUN, [{"run_id": run_id, "seq": seq} for seq in seqs])

    @_reading
    async def to_free(self, db: Transaction, limit: int) -> list[LetGoRow]:
        """Return objects that were released and not yet freed."""
        return [LetGoRow(*row) for row in await db.fetch(queries.TO_FREE, n=limit)]

    @_writing
    async def freed(self, db: Transaction, epoch: int, rows: list[LetGoRow]) -> None:
        """Remove these from the objects to free. Raises FencedError if `epoch` is over."""
        await _check_epoch(db, epoch)
        await db.execute_each(queries.FREED, [one._asdict() for one in rows])

    @_reading
    async def referenced(self, db: Transaction, object_ids: list[bytes]) -> set[bytes]:
        """Return those of these objects that a payload, result or failed attempt of any run refers to."""
        return {row[0] for row in await db.fetch(queries.REFERENCED, ids=object_ids)}

    @_reading
    async def run_objects(self, db: Transaction, run_id: str) -> set[bytes]:
        """Return objects that a run's payloads, results and failed attempts refer to."""
        return {bytes(row[0]) for row in await db.fetch(queries.RUN_OBJECTS, run_id=run_id)}


async def _first(db: Transaction, query: str, **named: Any) -> Row | None:
    return next(iter(await db.fetch(query, **named)), None)


async def _value(db: Transaction, query: str, **named: Any) -> Any:
    """Return the single column of the first row, or None."""
    row = await _first(db, query, **named)
    return None if row is None else row[0]


async def _check_epoch(db: Transaction, epoch: int) -> None:
    """Raise FencedError for another epoch. The lease is read without a lock: neither a renewal nor a commit may wait
    for less urgent work."""
    if await _value(db, queries.EPOCH) != epoch:
        raise FencedError(f"the lease is no longer at epoch {epoch}: nothing was recorded")


async def _add_output(db: Transaction, run_id: str, outputs: list[NewOutput]) -> None:
    last = await _value(db, queries.LAST_POSITION, run_id=run_id)
    run_ids, workers, lines = zip(*outputs, strict=True)
    sizes = list(map(len, lines))
    positions = list(accumulate(sizes, initial=last))[1:]
    await db.insert([(queries.OUTPUTS, [run_ids, positions, sizes, workers, lines])])
    tail = positions[-1] - OUTPUT_TAIL
    if tail > OUTPUT_HEAD:
        await db.execute(queries.CUT_OUTPUT, run_id=run_id, head=OUTPUT_HEAD, tail=tail)


async def _purge(db: Transaction, limit: int) -> int:
    removed = 0
    while removed < limit:
        log = await _value(db, queries.NEXT_PURGE)
        if log is None:
            break
        for query in queries.PURGE_ROWS:
            if removed < limit:
                removed += await db.execute(query, log=log, n=limit - removed)
        if removed < limit:
            await db.execute(queries.END_PURGE, log=log)
            removed += 1
    return removed


async def _run_view(db: Transaction, row: Row) -> RunView:
    run = rows.run_row(row)
    log = await _first(db, queries.LOG_BY_NUMBER, log=run.root_log)
    lanes = [rows.lane_row(lane) for lane in await db.fetch(queries.LANES_OF_RUN, run_id=run.spec.run_id)]
    return rows.run_view(run, None if log is None else rows.log_row(log), lanes)
