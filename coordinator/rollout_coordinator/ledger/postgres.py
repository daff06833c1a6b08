"""The ledger on PostgreSQL: every call is one explicit transaction, every set is one statement over arrays."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rollout.model.errors import StorageUnavailableError
from rollout.model.item import Outcome
from rollout.storage.postgres import CommitUnknown, Connection, PostgresEngine
from tenacity import AsyncRetrying, RetryError, retry_if_exception_type, stop_after_delay, wait_random_exponential

from rollout_coordinator.core.events import IdsLoaded, Loaded, ResultsLoaded
from rollout_coordinator.core.settings import QUARANTINED_MAX
from rollout_coordinator.core.step import LoadIds, LoadItems, LoadPending, LoadResults, Snapshot, WorkerRow, Writes
from rollout_coordinator.core.views import RunView
from rollout_coordinator.ledger import history, queries, reads, rows
from rollout_coordinator.ledger.port import (
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
from rollout_coordinator.ledger.writes import bulks

SET_ROWS = 50_000
FETCH_ROWS = 500
PAGE_ROWS = 2000
PAGE_BYTES = 1 << 20
PURGE_MS = 30_000

GIVEN = (
    "(SELECT log, seq, attempt, n - 1 AS n"
    " FROM unnest(:logs::bigint[], :seqs::bigint[], :attempts::bigint[]) WITH ORDINALITY AS u(log, seq, attempt, n))"
)
SEQS = "SELECT unnest(:seqs::bigint[])"
IDS = "SELECT unnest(:ids::bytea[])"
STATES = "SELECT unnest(:states::text[])"
WORKERS = "SELECT unnest(:workers::text[])"


async def _fetch(db: Connection, query: str, **parameters: Any) -> list[Any]:
    text, names = queries.for_postgres(query)
    return await db.fetch(text, *(parameters[name] for name in names))


async def _value(db: Connection, query: str, **parameters: Any) -> Any:
    found = await _fetch(db, query, **parameters)
    return found[0][0] if found else None


async def _accepted(db: Connection, replay: reads.Replay) -> None:
    wanted = replay.ranges_wanted()
    for at in range(0, len(wanted), SET_ROWS):
        given = _given([(log, seq, 0) for log, seq in wanted[at : at + SET_ROWS]])
        replay.ranges(await _fetch(db, queries.ACCEPTED_RANGES.format(given=GIVEN), **given))


async def _won(db: Connection, replay: reads.Replay) -> None:
    for wanted in replay.grouped():
        replay.won(wanted["log"], await _fetch(db, queries.WON, **wanted))


async def _execute(db: Connection, query: str, **parameters: Any) -> int:
    """The number of rows it changed."""
    text, names = queries.for_postgres(query)
    status: str = await db.execute(text, *(parameters[name] for name in names))
    return int(status.rsplit(" ", 1)[-1])


class PostgresLedger:
    """`Ledger` in a PostgreSQL database. `ttl` is the lease's, in seconds: every transaction is bounded by a third."""

    def __init__(self, url: str, *, pool_size: int = 8, ttl: float = 5.0):
        self._engine = PostgresEngine(url, pool_size=pool_size)
        self._ttl = ttl
        self._bound_ms = max(50, int(ttl * 1000 / 3) - 50)
        self._dead_batches: list[int] = []

    async def open(self) -> None:
        await self._engine.open()

    async def close(self) -> None:
        await self._engine.close()

    # ---- lease

    async def read_lease(self) -> LeaseRow | None:
        async with self._engine.read() as db:
            found = await _fetch(db, queries.READ_LEASE)
        return rows.lease_row(found[0]) if found else None

    async def insert_lease(self, row: LeaseRow) -> bool:
        return await self._changed(queries.INSERT_LEASE, rows.lease_columns(row))

    async def swap_lease(self, old: LeaseRow, new: LeaseRow) -> bool:
        # Whoever swaps from another holder has waited out its TTL, or found its word that it is gone.
        free = old.holder != new.holder
        columns = rows.lease_columns(new) | rows.lease_columns(old, "old_")
        return await self._changed(queries.SWAP_LEASE, columns, free=free)

    async def renew_lease(self, holder: str, epoch: int) -> bool:
        return await self._changed(queries.RENEW_LEASE, {"holder": holder, "epoch": epoch})

    async def _changed(self, query: str, parameters: dict[str, Any], *, free: bool = False) -> bool:
        try:
            async with self._engine.write(self._bound_ms) as db:
                if free:
                    await db.execute(queries.FREE_LEASE)
                return await _execute(db, query, **parameters) == 1
        except CommitUnknown as error:
            raise StorageUnavailableError(
                "the connection to PostgreSQL broke while the lease was written: read it again"
            ) from error

    # ---- the one writer

    async def commit(self, fence: Fence, writes: Writes) -> None:
        dead, self._dead_batches = self._dead_batches, []
        try:
            async with self._engine.write(self._bound_ms) as db:
                await self._commit(db, fence, writes, dead)
        except CommitUnknown as error:
            if not await self._was_committed(fence):
                raise StorageUnavailableError(
                    "the connection to PostgreSQL broke at COMMIT: nothing was written"
                ) from error

    async def _commit(self, db: Connection, fence: Fence, writes: Writes, dead_batches: list[int]) -> None:
        # Literal integers: the simple protocol takes one round trip.
        fencing = queries.FENCE.replace(":epoch", str(int(fence.epoch))).replace(":batch", str(int(fence.batch)))
        if await db.execute(fencing) != "UPDATE 1":
            raise fence.lost()
        await _insert(db, list(bulks(writes)))
        if writes.prune:
            logs, seqs, positions = (list(column) for column in zip(*writes.prune, strict=True))
            await _execute(
                db, queries.PRUNE_MANY, outcome=int(Outcome.SKIPPED), logs=logs, seqs=seqs, positions=positions
            )
        for log, seq in writes.released:
            await _execute(db, queries.LET_GO, log=log, seq=seq)
        for log, seq, attempt in writes.released_attempts:
            await _execute(db, queries.LET_GO_OF_ATTEMPT, log=log, seq=seq, attempt=attempt)
        for log, seq, object_id in writes.released_held:
            await _execute(db, queries.LET_GO_OF_HELD, log=log, seq=seq, object_id=object_id)
        retired = [*writes.retired, *dead_batches]
        if retired:
            await _execute(db, queries.RETIRE_MANY, batches=retired)
        for run_id in writes.deleted_runs:
            await _execute(db, queries.KEEP_NEXT_LOG)
            for query in (queries.MARK_PURGE, *queries.DELETE_RUN):
                await _execute(db, query, run_id=run_id)

    async def _was_committed(self, fence: Fence) -> bool:
        """Read `batch` under the row's lock, so that a COMMIT still under way on the server is over by then."""
        deadline = asyncio.get_running_loop().time() + self._ttl
        try:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type(StorageUnavailableError),
                stop=stop_after_delay(self._ttl),
                wait=wait_random_exponential(multiplier=0.05, max=0.5),
            ):
                with attempt:
                    async with asyncio.timeout_at(deadline):
                        return await self._read_batch() == (fence.epoch, fence.batch + 1)
        except (RetryError, TimeoutError) as error:
            raise StorageUnavailableError(
                "the connection to PostgreSQL broke at COMMIT and did not come back in time: discard and replay"
            ) from error
        raise AssertionError("a retry loop ends in a return or an error")

    async def _read_batch(self) -> tuple[int, int] | None:
        try:
            async with self._engine.write(self._bound_ms) as db:
                found = await db.fetch("SELECT epoch, batch FROM lease WHERE one = 1 FOR UPDATE")
                return tuple(found[0]) if found else None
        except CommitUnknown as error:
            raise StorageUnavailableError from error

    async def purge(self, limit: int) -> int:
        """Remove up to about `limit` rows of deleted runs; 0 when nothing is left."""
        removed = 0
        try:
            async with self._engine.write(PURGE_MS) as db:
                while removed < limit:
                    log = await _value(db, queries.NEXT_PURGE)
                    if log is None:
                        break
                    for query in queries.PURGE_ROWS:
                        if removed < limit:
                            removed += await _execute(db, query, log=log, n=limit - removed)
                    if removed < limit:
                        await _execute(db, queries.END_PURGE, log=log)
                        removed += 1
        except CommitUnknown:
            # Either way the next call goes on from what is there.
            return removed
        return removed

    async def forget_workers(self, before_ms: int, limit: int) -> int:
        try:
            async with self._engine.write(PURGE_MS) as db:
                return await _execute(db, queries.FORGET_WORKERS, before=before_ms, n=limit)
        except CommitUnknown:
            return 0  # either way the next call goes on from what is there

    # ---- history

    async def record(self, epoch: int, outputs: list[NewOutput], events: list[NewEvent]) -> None:
        # The lease is read and not locked: a renewal or a commit must not wait for what is only for people.
        try:
            async with self._engine.write(self._bound_ms) as db:
                history.check_epoch(await _value(db, queries.EPOCH), epoch)
                for run_id, of_run in history.by_run(outputs).items():
                    await _record_output(db, run_id, of_run)
                if events:
                    last = await _value(db, queries.LAST_EVENT)
                    await _insert(db, [(queries.EVENTS, history.event_columns(events, last))])
                    await _execute(db, queries.CUT_EVENTS, last=history.first_event_kept(last + len(events)))
                    for of_run in history.runs_of(events):
                        await _execute(db, queries.CUT_EVENTS_OF_RUN, **of_run)
        except CommitUnknown as error:
            raise StorageUnavailableError("the connection to PostgreSQL broke while history was recorded") from error

    async def trim_output(self, most: int) -> list[tuple[str, int]]:
        async with self._engine.write(self._bound_ms) as db:
            gone = history.too_much(await _fetch(db, queries.OUTPUT_BY_RUN), most)
            for run_id, _, last in gone:
                await _execute(db, queries.DROP_OUTPUT, run_id=run_id, last=last)
                await _execute(db, queries.EMPTY_OUTPUT, run_id=run_id, last=last, nothing=b"")
        return [(run_id, size) for run_id, size, _ in gone]

    async def output(self, run_id: str, after: int, max_bytes: int) -> list[OutputRow]:
        async with self._engine.read() as db:
            found = await _fetch(db, queries.OUTPUT_AFTER, run_id=run_id, after=after, n=history.CHUNKS)
        return history.output_rows(found, max_bytes)

    async def events(self, of: EventsOf, after: int, limit: int) -> list[EventRow]:
        async with self._engine.read() as db:
            return history.event_rows(await _fetch(db, queries.EVENTS_AFTER, **history.events_of(of, after, limit)))

    async def newest_events(self, of: EventsOf, limit: int) -> list[EventRow]:
        async with self._engine.read() as db:
            found = await _fetch(db, queries.NEWEST_EVENTS, **history.events_of(of, 0, limit))
        return history.event_rows(found[::-1])

    # ---- replay

    async def snapshot(self) -> Snapshot:
        replay = reads.Replay()
        snapshot = replay.snapshot
        async with self._engine.read() as db:
            snapshot.runs = [rows.run_row(row) for row in await _fetch(db, queries.LIVE_RUNS)]
            replay.logs(await _fetch(db, queries.LIVE_LOGS))
            snapshot.lanes = [rows.lane_row(row) for row in await _fetch(db, queries.LIVE_LANES)]
            snapshot.specs = [rows.spec_row(row) for row in await _fetch(db, queries.LIVE_SPECS)]
            out = await _fetch(db, queries.QUARANTINED_WORKERS, n=QUARANTINED_MAX)
            snapshot.workers = [rows.worker_row(row) for row in (*await _fetch(db, queries.LIVE_WORKERS), *out)]
            await _accepted(db, replay)
            await _won(db, replay)
            replay.assignments(await _fetch(db, queries.LIVE_ASSIGNMENTS))
            for at, chunk in replay.given(SET_ROWS):
                query = queries.OPEN_ATTEMPTS.format(given=GIVEN)
                replay.open(at, await _fetch(db, query, **_given([row[:3] for row in chunk])))
            snapshot.next_log = await _value(db, queries.NEXT_LOG)
            snapshot.next_batch = await _value(db, queries.NEXT_BATCH)
        self._dead_batches = replay.finish()
        return snapshot

    async def run_snapshot(self, run_id: str) -> Snapshot | None:
        replay = reads.Replay()
        snapshot = replay.snapshot
        async with self._engine.read() as db:
            snapshot.runs = [rows.run_row(row) for row in await _fetch(db, queries.RUN_BY_ID, run_id=run_id)]
            if not snapshot.runs:
                return None
            replay.logs(await _fetch(db, queries.LOGS_OF_RUN, run_id=run_id))
            snapshot.lanes = [rows.lane_row(row) for row in await _fetch(db, queries.LANES_OF_RUN, run_id=run_id)]
            snapshot.specs = [rows.spec_row(row) for row in await _fetch(db, queries.SPECS_OF_RUN, run_id=run_id)]
            await _accepted(db, replay)
            await _won(db, replay)
        return snapshot

    # ---- reads of the core

    async def pending(self, load: LoadPending) -> Loaded:
        async with self._engine.read() as db:
            builder = reads.PendingBuilder(load, await _value(db, queries.LAST_SEQ, log=load.log))
            page = ahead = FETCH_ROWS
            while not builder.complete:
                n, first, to = min(page, load.limit - builder.count), builder.next_seq, builder.next_seq + ahead
                found = await _fetch(db, queries.PENDING, log=load.log, from_seq=first, to_seq=to, n=n)
                builder.add(found, n, to)
                # Small rows: more at once, for each page waits for its turn. Large payloads: no more than now.
                page = max(FETCH_ROWS, min(PAGE_BYTES // max(1, builder.mean_bytes), PAGE_ROWS))
                # Further at a time where most rows have results.
                ahead = page if len(found) == n else min(2 * ahead, SET_ROWS)
            if builder.span is not None:
                first, last = builder.span
                history = await _fetch(db, queries.HISTORY_BETWEEN, log=load.log, from_seq=first, to_seq=last)
                reads.add_history(builder.loaded.items, history)
        return builder.loaded

    async def items(self, load: LoadItems) -> Loaded:
        async with self._engine.read() as db:
            found = await _fetch(db, queries.ITEMS_AT.format(seqs=SEQS), log=load.log, seqs=load.seqs)
            items = [reads.pending_item(row) for row in found]
            history = await _fetch(db, queries.HISTORY_AT.format(seqs=SEQS), log=load.log, seqs=load.seqs)
            reads.add_history(items, history)
        return Loaded(load.load_id, load.log, items, 0, False)

    async def ids(self, load: LoadIds) -> IdsLoaded:
        async with self._engine.read() as db:
            found = await _fetch(
                db, queries.IDS, log=load.log, from_seq=load.first_seq, to_seq=load.first_seq + load.count
            )
        return IdsLoaded(load.load_id, load.log, load.first_seq, [row[0] for row in found])

    async def results(self, load: LoadResults) -> ResultsLoaded:
        async with self._engine.read() as db:
            found = await _fetch(
                db, queries.RESULTS_BETWEEN, log=load.log, from_seq=load.first_seq, to_seq=load.first_seq + load.limit
            )
        return reads.results_loaded(load, found)

    async def commit_log(self, log: int, cursor: int, limit: int, max_bytes: int, payloads: bool) -> CommitPage:
        builder = reads.PageBuilder(cursor, max_bytes, payloads)
        async with self._engine.read() as db:
            committed = await _value(db, queries.LOG_CURSOR, log=log)
            placed = await _value(db, queries.IS_PLACED, log=log)
            if committed is None or placed is None:
                return builder.page
            end = min(cursor + limit, committed)
            query = queries.commit_page(placed, payloads)
            for at in range(cursor, end, FETCH_ROWS):
                found = await _fetch(db, query, log=log, from_pos=at, to_pos=min(at + FETCH_ROWS, end))
                if not all(map(builder.add, found)):
                    break
        return builder.page

    # ---- views for the service

    async def run_view(self, run_id: str) -> RunView | None:
        async with self._engine.read() as db:
            found = await _fetch(db, queries.RUN_BY_ID, run_id=run_id)
            return await _run_view(db, found[0]) if found else None

    async def run_views(self, states: tuple[str, ...], limit: int) -> list[RunView]:
        query = queries.NEWEST_RUNS.format(states=STATES)
        async with self._engine.read() as db:
            found = await _fetch(db, query, any_state=int(not states), states=list(states), n=limit)
            return [await _run_view(db, row) for row in found]

    async def find_runs(self, text: str, *, complete: bool, limit: int) -> list[FoundRun]:
        asked = rows.find_columns(text, complete=complete, limit=limit)
        async with self._engine.read() as db:
            return [FoundRun(*row) for row in await _fetch(db, queries.FIND_RUNS, **asked)]

    async def workers(self, limit: int) -> list[WorkerRow]:
        async with self._engine.read() as db:
            return [rows.worker_row(row) for row in await _fetch(db, queries.NEWEST_WORKERS, n=limit)]

    async def workers_at(self, incarnations: list[str]) -> list[WorkerRow]:
        async with self._engine.read() as db:
            found = await _fetch(db, queries.WORKERS_AT.format(workers=WORKERS), workers=incarnations)
        return [rows.worker_row(row) for row in found]

    async def seqs(self, log: int, which: Which, from_seq: int, limit: int) -> Seqs:
        async with self._engine.read() as db:
            last = await _value(db, queries.LAST_SEQ, log=log)
            end = 0 if last is None else last + 1
            if from_seq >= end:
                return Seqs([], end, True)
            if which is Which.ALL:
                to_seq = min(from_seq + limit, end)
                return Seqs(list(range(from_seq, to_seq)), to_seq, to_seq >= end)
            to_seq = from_seq + reads.OPEN_SPAN
            named = {"log": log, "from_seq": from_seq, "n": limit}
            if which is Which.OPEN:
                named["to_seq"] = to_seq
            found = [row[0] for row in await _fetch(db, reads.SEQS_OF[which], **named)]
        return reads.seqs_found(which, found, limit, to_seq, end)

    async def item_states(self, log: int, seqs: list[int]) -> list[ItemStateRow]:
        async with self._engine.read() as db:
            found = await _fetch(db, queries.STATES_AT.format(seqs=SEQS), log=log, seqs=seqs)
        return [reads.item_state(row) for row in found]

    async def item(self, log: int, seq: int, attempts: int) -> ItemRecord | None:
        async with self._engine.read() as db:
            found = await _fetch(db, queries.ITEM_AT, log=log, seq=seq)
            ended = await _fetch(db, queries.ATTEMPTS_AT, log=log, seq=seq, n=attempts)
        return reads.item_record(found[0], ended) if found else None

    async def attempts(self, log: int, after: tuple[int, int], limit: int, max_bytes: int) -> list[AttemptAt]:
        async with self._engine.read() as db:
            found = await _fetch(db, queries.ATTEMPTS_AFTER, log=log, seq=after[0], attempt=after[1], n=limit)
        return reads.attempts_page(found, max_bytes)

    async def child_log(self, log: int, seq: int) -> ChildLog | None:
        async with self._engine.read() as db:
            found = await _fetch(db, queries.CHILD_LOG, log=log, seq=seq)
        return ChildLog(*found[0]) if found else None

    async def last_failures(self, log: int, limit: int) -> list[FailureRow]:
        async with self._engine.read() as db:
            found = [
                *await _fetch(db, queries.LAST_FAILED, log=log, n=limit),
                *await _fetch(db, queries.LAST_FAILED_ATTEMPTS, log=log, n=limit),
            ]
        return reads.last_failures(found, limit)

    async def kept(self, run_id: str) -> list[KeptRow]:
        async with self._engine.read() as db:
            return [KeptRow(*row) for row in await _fetch(db, queries.KEPT_OF_RUN, run_id=run_id)]

    async def release(self, epoch: int, run_id: str, seqs: list[int]) -> None:
        try:
            async with self._engine.write(self._bound_ms) as db:
                history.check_epoch(await _value(db, queries.EPOCH), epoch)
                for seq in seqs:
                    await _execute(db, queries.LET_GO_OF_RUN, run_id=run_id, seq=seq)
        except CommitUnknown as error:
            raise StorageUnavailableError from error

    async def to_free(self, limit: int) -> list[LetGoRow]:
        async with self._engine.read() as db:
            return [LetGoRow(*row) for row in await _fetch(db, queries.TO_FREE, n=limit)]

    async def freed(self, epoch: int, rows: list[LetGoRow]) -> None:
        try:
            async with self._engine.write(self._bound_ms) as db:
                history.check_epoch(await _value(db, queries.EPOCH), epoch)
                for one in rows:
                    await _execute(db, queries.FREED, log=one.log, seq=one.seq, object_id=one.object_id)
        except CommitUnknown as error:
            raise StorageUnavailableError from error

    async def referenced(self, object_ids: list[bytes]) -> set[bytes]:
        async with self._engine.read() as db:
            return {row[0] for row in await _fetch(db, queries.REFERENCED.format(ids=IDS), ids=object_ids)}

    async def run_objects(self, run_id: str) -> set[bytes]:
        async with self._engine.read() as db:
            return {row[0] for row in await _fetch(db, queries.RUN_OBJECTS, run_id=run_id)}


async def _record_output(db: Connection, run_id: str, outputs: list[NewOutput]) -> None:
    if await _value(db, queries.IS_RUN, run_id=run_id) is None:
        return
    columns, last = history.output_columns(outputs, await _value(db, queries.LAST_POSITION, run_id=run_id))
    await _insert(db, [(queries.OUTPUTS, columns)])
    if (over := history.cut(run_id, last)) is not None:
        await _execute(db, queries.CUT_OUTPUT, **over)


def _given(keys: Sequence[tuple[int, int, int]]) -> dict[str, list[int]]:
    logs, seqs, attempts = zip(*keys, strict=True)
    return {"logs": list(logs), "seqs": list(seqs), "attempts": list(attempts)}


async def _insert(db: Connection, parts: list[tuple[Bulk, list[Sequence[Any]]]]) -> None:
    """All tables in one statement: each insert is a CTE, so it costs two round trips whatever it holds."""
    if not parts:
        return
    inserts: list[str] = []
    arguments: list[Any] = []
    for number, (bulk, columns) in enumerate(parts):
        rows_of = _rows(bulk, columns, arguments)
        inserts.append(f"{bulk.table}_{number} AS ({bulk.insert} {rows_of}{bulk.conflict})")
    await db.execute(f"WITH {', '.join(inserts)} SELECT 1", *arguments)


def _rows(bulk: Bulk, columns: list[Sequence[Any]], arguments: list[Any]) -> str:
    """A SELECT of these rows, over parameters that are added to `arguments`.

    A column that says the same in every row is one value: encoding an array and keeping what it unnests to, which the
    server does for each array by itself, cost about as much as the insert. One row needs no array at all; of several,
    one column stays an array, whatever it says: it is their number.
    """
    selected: list[str] = []
    arrays: list[str] = []
    for at, (kind, column) in enumerate(zip(bulk.types, columns, strict=True)):
        first = column[0]
        last = at == len(columns) - 1 and not arrays
        if len(column) == 1 or (not last and column[-1] == first and list(column).count(first) == len(column)):
            arguments.append(first)
            selected.append(f"${len(arguments)}::{kind}")
        else:
            arguments.append(list(column))
            arrays.append(f"${len(arguments)}::{kind}[]")
            selected.append(f"u.c{len(arrays)}")
    if not arrays:
        return f"SELECT {', '.join(selected)}"
    names = ", ".join(f"c{n}" for n in range(1, len(arrays) + 1))
    return f"SELECT {', '.join(selected)} FROM unnest({', '.join(arrays)}) AS u({names})"


async def _run_view(db: Connection, row: Sequence[Any]) -> RunView:
    run = rows.run_row(row)
    log = await _fetch(db, queries.LOG_BY_NUMBER, log=run.root_log)
    lanes = [rows.lane_row(lane) for lane in await _fetch(db, queries.LANES_OF_RUN, run_id=run.spec.run_id)]
    return rows.run_view(run, rows.log_row(log[0]) if log else None, lanes)
