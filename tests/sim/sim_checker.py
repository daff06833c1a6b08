"""What must hold after every step, whatever happens. Incremental: a check costs as much as the step changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout.model.item import AttemptEnd, Outcome
from rollout.model.run import ENDED, RunState
from rollout.model.worker import WorkerState
from rollout_coordinator.core import step as st
from rollout_coordinator.core.capacity import fits, free_credit
from rollout_coordinator.core.events import Event, Keys, WorkerHello, WorkerResults
from rollout_coordinator.core.state import State, Worker
from rollout_coordinator.core.steal import backlog
from rollout_coordinator.core.workers import ALIVE
from rollout_coordinator.ledger.port import Fence
from rollout_worker.attempts import AttemptKey
from sim_store import Tables

START_CODES = ("start_error", "engine_start")


class Violation(Exception):
    """An invariant does not hold. `tail` is the end of the trace."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant
        self.message = message
        self.seed = -1
        self.at = 0.0
        self.tail: list[str] = []

    def __str__(self) -> str:
        return f"seed {self.seed} at {self.at:.3f} s: {self.invariant}: {self.message}"


def expected(item_id: bytes, payload: bytes) -> bytes:
    """The result of an item: the same whoever runs it, and however often."""
    return b"=" + item_id[:12] + payload


def books(state: State) -> None:
    """What a core counts of each worker, against the attempts that it has; and who may be given more."""
    for run in state.runs.values():
        window = 0
        for log in run.logs.values():
            window += log.window
        if run.window != window:
            raise Violation("books", f"{run.id} counts {run.window} items in its window")
        holders = [worker.id for worker in state.workers.values() if run.id in worker.by_run]
        if run.spec.one_worker and len(holders) > 1:
            raise Violation("books", f"{run.id} is for one worker at a time, and {holders} have items of it")
    gone = [worker.id for worker in state.ready.values() if worker.state not in ALIVE]
    if gone:
        raise Violation("books", f"{gone} have left, and are remembered for work")
    for worker in state.workers.values():
        _count(worker)
        if worker.id not in state.ready and worker.session and worker.state is WorkerState.READY:
            _remembered(state, worker)


def _remembered(state: State, worker: Worker) -> None:
    """Who is not asked at the next dispatch has no room for anything that is pending, or that makes it be asked."""
    for run in state.runs.values():
        if run.state is not RunState.RUNNING or free_credit(worker, run) <= 0:
            continue
        for requirements, heap in run.index.ready.items():
            if any(entry[-1].size for entry in heap) and fits(worker, requirements):
                if worker.id in state.parked and requirements not in state.rested_for:
                    continue
                raise Violation("books", f"{worker.id} has room for items of {run.id} and is not remembered for work")


def _count(worker: Worker) -> None:
    have = begun = waits = rest = size = 0
    holds: dict[str, int] = {}
    for batch in worker.batches.values():
        flight, started, waiting, held = batch.log.flight, batch.started, batch.waiting, 0
        for seq in batch.seqs:
            if flight.get(seq) is not batch:
                continue
            have += 1
            begun += seq in started
            if seq in waiting:
                waits += 1
            else:
                held += 1
                rest += seq not in started
        if held:
            run_id = batch.log.run.id
            holds[run_id] = holds.get(run_id, 0) + held
            size += held * batch.item_bytes
    if (worker.in_flight, worker.running, worker.waiting) != (have, begun, waits):
        counted = (worker.in_flight, worker.running, worker.waiting)
        raise Violation("books", f"{worker.id} counts {counted}, and has {have}, {begun}, {waits}")
    if worker.holds != holds and Counter(worker.holds) != Counter(holds):  # a count of 0 is none
        raise Violation("books", f"{worker.id} holds {worker.holds}")
    if worker.bytes != size:
        raise Violation("books", f"{worker.id} holds {worker.bytes} bytes")
    if backlog(worker) != rest:
        raise Violation("books", f"{worker.id} has a backlog of {backlog(worker)}: {rest} that it has not begun")


class Sessions:
    """Of one life of a core: what it writes came on the newest stream of its worker."""

    def __init__(self) -> None:
        self._worker: dict[str, str] = {}  # of a session
        self._newest: dict[str, str] = {}  # of a worker

    def stepped(self, events: Sequence[Event], step: st.Step, heeded: Mapping[str, Worker]) -> None:
        """`heeded`: the sessions whose frames the core takes."""
        old: set[tuple[int, int, int]] = set()
        new: set[tuple[int, int, int]] = set()
        greeted: list[str] = []
        for event in events:
            if isinstance(event, WorkerHello):
                self._worker[event.session] = event.incarnation
                self._newest[event.incarnation] = event.session
                greeted.append(event.incarnation)
            elif isinstance(event, WorkerResults):
                worker = self._worker.get(event.session, "")
                told = new if self._newest.get(worker) == event.session else old
                told.update((g.log, *key) for g in event.groups for key in zip(g.seq, g.attempt, strict=True))
        for incarnation in greeted:
            heard = [session for session, worker in heeded.items() if worker.id == incarnation]
            if len(heard) > 1:
                raise Violation("older_stream", f"{incarnation} is heard on {heard}")
        old -= new
        for row in step.writes.results if old else ():
            for seq, attempt, outcome in zip(row.seq, row.attempt, row.outcome, strict=True):
                if (row.log, seq, attempt) in old and outcome is Outcome.DONE:
                    raise Violation("older_stream", f"{row.log}/{seq}/{attempt}: its stream was replaced before")


class Checker:
    """Hears of transactions, sends, frames, acknowledgements, pages and executions."""

    def __init__(self, tables: Tables, holds: Callable[[str, AttemptKey], bool]) -> None:
        self.t = tables
        self._holds = holds
        self.ids: dict[str, list[bytes]] = {}  # of each run, as its client submits them
        self.commit_logs: dict[int, list[tuple[int, int, int, Any]]] = {}
        self.counts: dict[int, list[int]] = {}
        self.acknowledged: dict[str, int] = {}
        self.running: dict[tuple[int, int], dict[tuple[str, int], Any]] = {}  # exclusive items
        self.epochs: dict[str, int] = {}  # the newest that a worker process has seen
        self.hosts: dict[str, tuple[str, ...]] = {}  # the executors of each worker process
        self.start_failed: set[str] = set()  # executors that did not start somewhere

    # ---- transactions

    def before(self, who: str, fence: Fence, w: st.Writes) -> None:
        t = self.t
        lease = t.lease
        if lease is None or fence.epoch != lease.epoch:
            raise Violation("fencing", f"{who} committed as epoch {fence.epoch}, the lease is {lease}")
        if fence.batch != lease.batch:
            raise Violation("batch_number", f"{who} committed batch {fence.batch}, the lease is at {lease.batch}")
        rows = {group.log: len(t.items.get(group.log, ())) for group in w.items}
        for group in w.items:
            self._items(w, group, rows[group.log])
            rows[group.log] += len(group.ids)
        for row in w.assignments:
            for keys in row.keys:
                for seq, attempt in zip(keys.seq, keys.attempt, strict=True):
                    self._assigned(keys.log, seq, attempt, row.worker, w)
        for group in w.results:
            self._results(group, rows.get(group.log, len(t.items.get(group.log, ()))))
        for row in w.attempts:
            if row.end is AttemptEnd.REVOKED and self._holds(row.worker, AttemptKey(row.log, row.seq, row.attempt)):
                raise Violation(
                    "given_up", f"{row.log}/{row.seq}/{row.attempt} was taken from {row.worker}, which has it"
                )
        self._starts(w)
        if w.prune:
            self._pruned(w)

    def _starts(self, w: st.Writes) -> None:
        """No item pays for a start that failed, and no run ends with one that did not."""
        for group in w.results:
            if any(failure.code in START_CODES for failure in group.failures.values()):
                raise Violation("starts", f"an item of log {group.log} failed for a start: {group.failures}")
        for row in w.attempts:
            if row.code in START_CODES and row.end is not AttemptEnd.RELEASED:
                raise Violation("starts", f"{row.log}/{row.seq}/{row.attempt} paid for a start: {row.end}")
        for run in w.runs.values():
            ended = run.state is RunState.FAILED and "cannot start" in run.reason
            if ended and not any(repr(executor) in run.reason for executor in self.start_failed):
                raise Violation("starts", f"run {run.spec.run_id} ended with {run.reason}, which nobody met")

    def _pruned(self, w: st.Writes) -> None:
        fresh = {(g.log, seq): g.outcome[i] for g in w.results for i, seq in enumerate(g.seq)}
        for log, seq, _ in w.prune:
            row, found = self.t.logs[log], self.t.results.get(log, {}).get(seq)
            outcome = found.outcome if found is not None else fresh.get((log, seq))
            if seq < row.cursor or outcome is None:
                raise Violation("commit_log", f"{log}/{seq} was pruned, the cursor is at {row.cursor}")
            counts = self.counts[log]
            counts[outcome] -= 1
            counts[Outcome.SKIPPED] += 1

    def _items(self, w: st.Writes, group: st.ItemRows, have: int) -> None:
        if group.first_seq != have:
            raise Violation("submit", f"rows of log {group.log} from {group.first_seq}, there are {have}")
        row = w.logs.get(group.log) or self.t.logs[group.log]
        if row.parent_log:
            return
        ids = self.ids[row.run_id][group.first_seq : group.first_seq + len(group.ids)]
        if ids != group.ids[: len(ids)]:  # appended items follow those of the client
            raise Violation("submit", f"other ids than the client's in run {row.run_id} from {group.first_seq}")

    def _assigned(self, log: int, seq: int, attempt: int, worker: str, w: st.Writes) -> None:
        t = self.t
        if seq in t.results.get(log, ()):
            raise Violation("assignment", f"{log}/{seq} was assigned though it has a result")
        if attempt <= t.last.get((log, seq), 0):
            raise Violation("assignment", f"{log}/{seq}: attempt {attempt} was given before")
        given = t.given.get((log, seq))
        if given is not None and not any(
            (a.log, a.seq, a.attempt) == (log, seq, given.attempt) for a in w.attempts
        ):  # fmt: skip
            raise Violation("assignment", f"{log}/{seq}: {attempt} for {worker} while {given} is open")

    def _results(self, group: st.ResultRows, submitted: int) -> None:
        """`submitted`: with those of this transaction, which may end what it takes."""
        t, log = self.t, group.log
        table, items = t.results.get(log, {}), t.items.get(log, ())
        counts = self.counts.setdefault(log, [0] * 5)
        for i, seq in enumerate(group.seq):
            outcome, attempt = group.outcome[i], group.attempt[i]
            counts[outcome] += 1
            if seq in table:
                raise Violation("committed_once", f"a second result for {log}/{seq}: attempt {attempt}")
            if seq >= submitted:
                raise Violation("committed_once", f"a result for {log}/{seq}, which was never submitted")
            given = t.given.get((log, seq))
            if outcome is Outcome.DONE:
                if given is None or (given.attempt, given.worker) != (attempt, group.worker):
                    raise Violation(
                        "current_assignment", f"{log}/{seq}: attempt {attempt} of {group.worker}, open is {given}"
                    )
                item_id, payload, _ = items[seq]
                if group.data[i] != expected(item_id, payload):
                    raise Violation("facts", f"{log}/{seq}: the result is {group.data[i]!r}")
            elif given is not None and attempt and given.attempt != attempt:
                raise Violation("current_assignment", f"{log}/{seq}: {attempt} ended it, open is {given}")

    def committed(self, w: st.Writes, before: dict[int, st.LogRow]) -> None:
        """`before`: the log rows as they were, of those that were written."""
        t = self.t
        for row in w.assignments:
            self._for_their_executors(row)
        for log, row in w.logs.items():
            old = before.get(log)
            if old is not None and (row.submitted < old.submitted or (old.sealed and not row.sealed)):
                raise Violation("submit", f"log {log} lost what was submitted: {old} -> {row}")
            if row.submitted != len(t.items.get(log, ())):
                raise Violation("submit", f"log {log} says {row.submitted} items")
            start = old.cursor if old is not None else 0
            if row.cursor < start:
                raise Violation("cursor", f"log {log}: the cursor went back from {start} to {row.cursor}")
            self._advanced(log, row, start)
            counts = self.counts.get(log, [0] * 5)
            if log in t.logs and counts[1:] != [row.done, row.failed, row.cancelled, row.skipped]:
                raise Violation("counters", f"log {log}: {counts[1:]} results, the row says {row}")
        for run in w.runs.values():
            if run.state is RunState.COMPLETED and run.spec.run_id in t.runs:
                root = t.logs[run.root_log]
                if not (root.sealed and root.cursor == root.submitted):
                    raise Violation("completed", f"run {run.spec.run_id} is completed at {root}")

    def _for_their_executors(self, row: st.AssignmentRow) -> None:
        """What is written here is what is sent: no item reaches a worker by another way."""
        t = self.t
        for keys in row.keys:
            run_id = t.logs[keys.log].run_id
            items, workload = t.items[keys.log], t.runs[run_id].spec.workload
            for seq, attempt in zip(keys.seq, keys.attempt, strict=True):
                spec = t.specs[run_id, items[seq][2]].spec
                self.hosted(row.worker, spec.executor or workload, (keys.log, seq, attempt))

    def hosted(self, worker: str, executor: str, key: tuple[int, int, int]) -> None:
        if executor not in self.hosts[worker]:
            raise Violation("executor", f"{key} for {executor} is given to {worker}, which hosts {self.hosts[worker]}")

    def _advanced(self, log: int, row: st.LogRow, start: int) -> None:
        if row.cursor == start or log not in self.t.logs:
            return
        table, places = self.t.results.get(log, {}), self.t.places.get(log)
        entries = self.commit_logs.setdefault(log, [])
        if len(entries) != start:
            raise Violation("commit_log", f"log {log} had {len(entries)} entries, the cursor says {start}")
        for position in range(start, row.cursor):
            seq = position if places is None else places.get(position, -1)
            result = table.get(seq)
            if result is None:
                raise Violation("cursor", f"log {log}: the cursor {row.cursor} passed {position} without a result")
            entries.append((seq, result.attempt, int(result.outcome), result.data))

    # ---- sends

    def sent(self, who: str, epoch: int, send: Any, continued: set[str], ended: set[tuple[int, int, int]]) -> None:
        """Inside the driver, as a send leaves. `continued`: runs that an operator had go on in the same step;
        `ended`: attempts (log, seq, attempt) that it cancels, which it says behind its Welcome, or whose worker leaves."""
        t = self.t
        if isinstance(send, st.Emit | st.RunMoved | st.RunConfigured):
            return
        if t.lease is None or t.lease.epoch != epoch:
            raise Violation("deposed_leader", f"{who} of epoch {epoch} said {send}; the lease is {t.lease}")
        if isinstance(send, st.SendAssign):
            for group in send.groups:
                for seq, attempt in zip(group.seq, group.attempt, strict=True):
                    if t.last.get((group.log, seq), 0) < attempt:
                        raise Violation("durable_before_sent", f"assignment {group.log}/{seq}/{attempt}")
        elif isinstance(send, st.SendAccepted | st.SendWelcome):
            self._accepted(send.accepted)
            if isinstance(send, st.SendWelcome):
                self._kept(send, ended)
        elif isinstance(send, st.SendRunEnded):
            run = t.runs.get(send.run_id)
            if run is not None and run.state not in ENDED and send.run_id not in continued:
                raise Violation("durable_before_sent", f"run {send.run_id} ended, on disk it is {run.state}")
        elif isinstance(send, st.SendChildren):
            results: Any = send.results
            table = t.results.get(results.log, {})
            if any(
                seq not in table or table[seq].data != data for seq, data in zip(results.seq, results.data, strict=True)
            ):
                raise Violation("durable_before_sent", f"children of {send.parent}")

    def _accepted(self, accepted: list[Keys]) -> None:
        for keys in accepted:
            table = self.t.results.get(keys.log, {})
            for seq, attempt in zip(keys.seq, keys.attempt, strict=True):
                durable = seq in table or attempt in self.t.attempts.get((keys.log, seq), ())
                if not durable and keys.log in self.t.logs:
                    raise Violation("durable_before_sent", f"{keys.log}/{seq}/{attempt} was called accepted")

    def _kept(self, send: st.SendWelcome, ended: set[tuple[int, int, int]]) -> None:
        for keys in send.keep:
            for seq, attempt in zip(keys.seq, keys.attempt, strict=True):
                given = self.t.given.get((keys.log, seq))
                is_open = given is not None and given.attempt == attempt
                if not is_open and (keys.log, seq, attempt) not in ended:
                    raise Violation("current_assignment", f"Welcome keeps {keys.log}/{seq}/{attempt}, open is {given}")

    def replied(self, who: str, epoch: int, value: Any) -> None:
        if isinstance(value, st.SubmitReply):
            log = self.t.logs.get(value.root_log)
            have = len(self.t.items.get(value.root_log, ()))
            if log is None or value.durable > have or (value.sealed and not log.sealed):
                raise Violation("durable_before_sent", f"{value}, on disk are {have} items of {log}")

    # ---- workers and clients

    def heard(self, worker: str, epoch: int) -> None:
        """A worker acts on what a coordinator said."""
        newest = self.epochs.get(worker, 0)
        if epoch < newest:
            raise Violation("stale_leader_obeyed", f"{worker} saw epoch {newest} and took what epoch {epoch} said")
        self.epochs[worker] = epoch

    def acknowledged_submit(self, run_id: str, durable: int) -> None:
        row = self.t.runs.get(run_id)
        have = len(self.t.items.get(row.root_log, ())) if row is not None else 0
        if durable > have:
            raise Violation("lost_submit", f"the client of {run_id} was told {durable}, on disk are {have}")
        self.acknowledged[run_id] = max(self.acknowledged.get(run_id, 0), durable)

    def page(self, run_id: str, entries: list[Any]) -> None:
        """What a client read of the commit log."""
        row = self.t.runs[run_id]
        log = self.commit_logs.get(row.root_log, [])
        for entry in entries:
            said = (entry.seq, entry.attempt, int(entry.outcome), entry.data)
            if entry.position >= len(log) or log[entry.position] != said:
                raise Violation("commit_log", f"run {run_id} at {entry.position}: read {said}")

    def starts(self, worker: str, log: int, seq: int, attempt: int, exclusive: bool, grace: Any) -> None:
        """An executor begins. `grace(worker)`: whether that worker's host has only just woken up."""
        if not exclusive:
            return
        running = self.running.setdefault((log, seq), {})
        for other, was in running:
            if not grace(other):
                raise Violation("exclusive", f"{log}/{seq}: {attempt} on {worker} while {was} runs on {other}")
        running[worker, attempt] = None

    def stops(self, worker: str, log: int, seq: int, attempt: int) -> None:
        running = self.running.get((log, seq))
        if running is not None:
            running.pop((worker, attempt), None)

    def died(self, worker: str) -> None:
        for running in self.running.values():
            for key in [k for k in running if k[0] == worker]:
                del running[key]

    # ---- the end

    def finished(self) -> None:
        """Every run has ended: what was acknowledged is there, and counted."""
        t = self.t
        for run_id, durable in self.acknowledged.items():
            row = t.runs[run_id]
            if len(t.items.get(row.root_log, ())) < durable:
                raise Violation("lost_submit", f"run {run_id}: {durable} were acknowledged")
            root = t.logs[row.root_log]
            if row.state is RunState.COMPLETED and len(t.results.get(root.log, ())) != root.submitted:
                raise Violation("completed", f"run {run_id}: {root}")
