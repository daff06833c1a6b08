"""Views of a run's items for clients: their state in the ledger, and who holds them now.

Every read is bounded, and only the question of who holds them runs in the task that owns the core.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rollout.model.counts import counted
from rollout.model.errors import InputError, NotFoundError
from rollout.model.item import Blob, ObjectSlice
from rollout.model.run import Order
from rollout.wire.codec import ref_to_wire
from rollout.wire.v1 import runs_pb2 as pb

from rollout_coordinator.core.step import WorkerRow
from rollout_coordinator.core.views import HeldView, RunView
from rollout_coordinator.driver import Driver
from rollout_coordinator.ledger.ledger import Ledger
from rollout_coordinator.ledger.port import EndedAttempt, ItemRecord, ItemStateRow, Seqs, Which
from rollout_coordinator.ledger.reads import SEQ_MAX
from rollout_coordinator.run_views import RunViews
from rollout_coordinator.runs_codec import filled

PAGE_MAX = 1000
PAGE_BYTES = 512 << 10
ATTEMPTS_MAX = 100
FAILURES_MAX = 100
HELD_MAX = 100
DEPTH_MAX = 32
RUNNING, PENDING = "running", "pending"
WHICH = (*(which for which in Which if which is not Which.OPEN), RUNNING, PENDING)
_ENDINGS = {"accepted": "done"}


class ItemViews:
    def __init__(self, driver: Driver, ledger: Ledger, views: RunViews) -> None:
        self._driver = driver
        self._ledger = ledger
        self._views = views

    # ---- items

    async def page(self, request: pb.ItemsRequest) -> pb.ItemsReply:
        """Return a page of items. Raises NotFoundError, or InputError for an unknown kind of items."""
        which = request.which or Which.ALL
        if which not in WHICH:
            raise InputError(f"There are no {which!r} items; ask for {', '.join(WHICH)}.")
        view = await self._views.get(request.run_id)
        log = await self._log(view, request.parent)
        limit = min(request.limit or PAGE_MAX, PAGE_MAX)
        seqs, next_seq, end = await self._seqs(view, log, which, request.from_seq, limit)
        items = await self._statuses(log, seqs)
        if which in (RUNNING, PENDING):
            items = [item for item in items if item.state == which]
        hosts = await self._hosts(item.worker for item in items)
        return pb.ItemsReply(items=items, next_seq=next_seq, end=end, hosts=hosts)

    async def _seqs(self, view: RunView, log: int, which: str, from_seq: int, limit: int) -> Seqs:
        if which == RUNNING:
            seqs = await self._driver.query(lambda core, now: core.running(log, from_seq, limit))
            return Seqs(seqs, seqs[-1] + 1 if seqs else from_seq, len(seqs) < limit)
        if which != PENDING:
            return await self._ledger.seqs(log, Which(which), from_seq, limit)
        if log == view.root_log and view.spec.order is Order.SCHEDULE:
            from_seq = max(from_seq, view.cursor)  # what is before it has a result
        return await self._ledger.seqs(log, Which.OPEN, from_seq, limit)

    async def _statuses(self, log: int, seqs: list[int]) -> list[pb.ItemStatus]:
        """Return their states. Holders are read first: an item that ends in between then has its result."""
        if not seqs:
            return []
        held = await self._driver.query(lambda core, now: core.in_flight(log, seqs))
        by_seq = {one.place[-1]: one for one in held}
        return [status_of(row, by_seq.get(row.seq)) for row in await self._ledger.item_states(log, seqs)]

    async def item(self, request: pb.ItemRequest) -> pb.ItemReply:
        """Return an item. Raises NotFoundError."""
        view = await self._views.get(request.run_id)
        if not request.place:
            raise InputError("The place of the item is missing.")
        _check_seqs(request.place)
        log, seq = await self._log(view, request.place[:-1]), request.place[-1]
        held = await self._driver.query(lambda core, now: core.in_flight(log, [seq]))
        record = await self._ledger.item(log, seq, min(request.attempts or ATTEMPTS_MAX, ATTEMPTS_MAX))
        if record is None:
            raise NotFoundError(f"{self._named(view, request.place)}: there is no such row.")
        current = held[0] if held and record.result is None else None
        reply = pb.ItemReply(item=status_of(record.state, current), has_result=record.result is not None)
        _put_blob(record.payload, reply, "payload")
        if record.result is not None:
            _put_blob(record.result, reply, "result")
        reply.attempts.extend(attempts_of(record, current))
        hosts = await self._hosts([reply.item.worker, *(one.worker for one in reply.attempts)])
        for one in reply.attempts:
            one.host = hosts.get(one.worker, "")
        children = await self._ledger.child_log(log, seq)
        if children is not None:
            reply.children, reply.children_final = children.submitted, children.cursor
        return reply

    async def attempts(self, request: pb.AttemptsRequest) -> pb.AttemptsReply:
        """Return attempts. Raises NotFoundError."""
        view = await self._views.get(request.run_id)
        log = await self._log(view, request.parent)
        limit = min(request.limit or PAGE_MAX, PAGE_MAX)
        after = (min(request.after_seq, SEQ_MAX), request.after_attempt)
        found = await self._ledger.attempts(log, after, limit, PAGE_BYTES)
        reply = pb.AttemptsReply(end=not found)
        hosts = await self._hosts(one.ended.worker for one in found)
        for one in found:
            status = attempt_status(one.ended)
            status.host = hosts.get(one.ended.worker, "")
            reply.attempts.add(seq=one.seq, attempt=status)
        return reply

    async def _log(self, view: RunView, place: Sequence[int]) -> int:
        """Return the log of that item's children, or the run's own for no item."""
        if len(place) > DEPTH_MAX:
            raise InputError(f"A place has at most {DEPTH_MAX} levels.")
        _check_seqs(place)
        log = view.root_log
        for depth, seq in enumerate(place, 1):
            child = await self._ledger.child_log(log, seq)
            if child is None:
                raise NotFoundError(f"{self._named(view, place[:depth])} has no children.")
            log = child.log
        return log

    @staticmethod
    def _named(view: RunView, place: Sequence[int]) -> str:
        row = ".".join(str(seq + 1) for seq in place)
        return f"Run {view.spec.run_id} has {counted(view.submitted, 'row')}; row {row}"

    # ---- runs and workers

    async def describe(self, view: RunView, failures: int, reply: pb.RunReply) -> None:
        """Add who works on the run, and the last failures."""
        run_id = view.spec.run_id
        here = await self._driver.query(lambda core, now: core.run_workers(run_id))
        reply.workers.extend(filled(pb.RunWorker, worker) for worker in here)
        found = await self._ledger.last_failures(view.root_log, min(failures, FAILURES_MAX))
        hosts = await self._hosts(one.worker for one in found)
        reply.failures.extend(filled(pb.RunFailure, one, host=hosts.get(one.worker, "")) for one in found)

    async def worker(self, incarnation: str, status: pb.WorkerStatus) -> None:
        """Add to the status of a worker what it holds."""
        detail = await self._driver.query(lambda core, now: core.worker_detail(incarnation, HELD_MAX))
        if detail is None:
            return
        status.runs.extend(filled(pb.WorkerRun, run) for run in detail.runs)
        status.held.extend(filled(pb.HeldAttempt, held) for held in detail.held)
        status.used.update(detail.used)

    async def known_worker(self, incarnation: str) -> WorkerRow | None:
        """Return the worker in the ledger."""
        found = await self._ledger.workers_at([incarnation])
        return found[0] if found else None

    async def _hosts(self, workers: Iterable[str]) -> dict[str, str]:
        wanted = sorted({worker for worker in workers if worker})
        known = await self._ledger.workers_at(wanted) if wanted else []
        return {row.incarnation: row.inventory.host for row in known if row.inventory.host}


def status_of(row: ItemStateRow, held: HeldView | None) -> pb.ItemStatus:
    status = filled(pb.ItemStatus, row, attempts=row.tries, duration_ms=max(0, row.duration_ms))
    if row.state == "open":
        status.state = PENDING
        if held is not None:
            status.state = RUNNING if held.began_ms else "assigned"
            status.attempts += held.began_ms > 0
            status.worker, status.at_ms, status.message = held.worker, held.began_ms, held.note
    return status


def attempts_of(record: ItemRecord, held: HeldView | None) -> list[pb.AttemptStatus]:
    """Return attempts in order: those that ended without ending the item, then the one that did or is in flight."""
    found = list(map(attempt_status, record.ended))
    state = record.state
    if held is not None:
        ending = RUNNING if held.began_ms else "assigned"
        found.append(pb.AttemptStatus(attempt=held.attempt, worker=held.worker, began_ms=held.began_ms, ending=ending))
    elif record.attempt and record.attempt not in (one.attempt for one in record.ended):
        last = EndedAttempt(
            record.attempt,
            state.worker,
            _ENDINGS.get(state.state, state.state),
            state.code,
            state.message,
            state.at_ms - state.duration_ms,
            state.at_ms,
            record.units_in,
            record.units_out,
            record.result or b"",
        )
        found.append(attempt_status(last))
    return found


def attempt_status(ended: EndedAttempt) -> pb.AttemptStatus:
    units_in, units_out = max(0, ended.units_in), max(0, ended.units_out)
    status = filled(pb.AttemptStatus, ended, ended_ms=ended.at_ms, units_in=units_in, units_out=units_out, data=b"")
    _put_blob(ended.data, status, "data")
    return status


def _put_blob(blob: Blob, reply: pb.ItemReply | pb.AttemptStatus, field: str) -> None:
    if isinstance(blob, ObjectSlice):
        getattr(reply, f"{field}_ref").CopyFrom(ref_to_wire(blob))
    else:
        setattr(reply, field, blob)


def _check_seqs(place: Sequence[int]) -> None:
    """Raise InputError for an invalid place."""
    if max(place, default=0) > SEQ_MAX:
        raise InputError(f"A row is numbered up to {SEQ_MAX}.")
