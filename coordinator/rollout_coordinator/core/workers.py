"""Workers as the coordinator knows them: alive, draining, silent, gone, quarantined.

One mechanism detects a dead worker: a deadline that every received frame postpones. When it passes, `worker_failed` is
emitted and the work is pending again in the same step.

An exclusive attempt of a worker that is no longer trusted stays in flight until its process has surely fenced itself.
It does once nothing postpones its fence: Work refuses its Hello, and no heartbeat is answered (`quarantine_error`). So
its deadline is that of a silent worker, after which `scan` takes back what is left.
"""

from __future__ import annotations

from rollout.model import events as names
from rollout.model.errors import NotFoundError, ProtocolError, RolloutError, UnavailableError
from rollout.model.ids import short
from rollout.model.item import NO_LIMIT, Failure
from rollout.model.run import ENDED
from rollout.model.worker import Credit, Inventory, WorkerState

from rollout_coordinator.core.attempts import cancel, current
from rollout_coordinator.core.events import (
    WorkerBeat,
    WorkerCommand,
    WorkerCredit,
    WorkerGone,
    WorkerGoodbye,
    WorkerLeaving,
    WorkerProgress,
)
from rollout_coordinator.core.failures import reclaim, timed_out
from rollout_coordinator.core.settings import QUARANTINED_MAX
from rollout_coordinator.core.state import NEVER, AttemptBatch, ProgressNote, State, Worker, reply
from rollout_coordinator.core.step import CloseSession, Emit, RunMoved, SendControl
from rollout_coordinator.core.transitions import WORKER

ALIVE = frozenset({WorkerState.JOINING, WorkerState.READY, WorkerState.DRAINING})
LEFT = frozenset({WorkerState.QUARANTINED, WorkerState.GONE})
UNKNOWN = Inventory(capacity=())
ANY_HOST = "?"
"""Host of a worker that only its open attempts mention: its row has ended, and its Hello says where it lives."""
NOTE_MAX = 1000  # characters
FIGURES_MAX = 4096  # bytes

# ---- who it is


def move(worker: Worker, cause: str) -> None:
    """Change the worker's state; the only way to do so. Raises StateError if the table does not list the change."""
    worker.state = WORKER.move(worker.state, cause)


def worker_of_session(state: State, session: str) -> Worker | None:
    """Return the worker whose newest session this is, which is thereby alive; None for older sessions, to be
    ignored."""
    worker = state.sessions.get(session)
    if worker is not None:
        extend_deadline(state, worker, state.now.mono)
    return worker


def extend_deadline(state: State, worker: Worker, read_at: float) -> None:
    due_at = read_at + 2 * state.settings.heartbeat_interval
    worker.due_at = max(worker.due_at, due_at)


def named(worker: Worker) -> dict[str, str]:
    """Return fields that name the worker for people. Its host's name comes with its Hello; until then its id is
    used."""
    name = worker.inventory.host or (short(worker.host_id) if worker.host_id != ANY_HOST else "")
    return {"worker": worker.id, "host": worker.host_id, "host_name": name, "address": worker.address}


def join(state: State, incarnation: str, host_id: str) -> Worker:
    worker = Worker(incarnation, host_id, UNKNOWN, WorkerState.JOINING, state.now)
    state.workers[incarnation] = worker
    state.step.sends.append(Emit(names.WORKER_REGISTERED, "info", {"worker": incarnation, "host": host_id}))
    return worker


def on_another_host(state: State, worker: Worker, host_id: str) -> bool:
    """Return whether a process on another host uses its id."""
    return worker.host_id not in (host_id, ANY_HOST)


def set_credit(worker: Worker, credit: Credit) -> None:
    worker.credit = credit
    worker.credit_runs = dict(credit.run_items)


def write(state: State, worker: Worker) -> None:
    state.step.writes.workers[worker.id] = worker.row()


# ---- what it says of itself


def beat(state: State, event: WorkerBeat) -> None:
    worker = state.workers.get(event.incarnation)
    if worker is None:
        worker = join(state, event.incarnation, event.host_id)
        state.step.sends.append(Emit(names.WORKER_HEARTBEAT, "info", {"worker": worker.id}))
    if worker.state not in ALIVE or on_another_host(state, worker, event.host_id):
        return
    extend_deadline(state, worker, event.read_at)
    worker.load, worker.cpu_percent, worker.memory_mib = event.load, event.cpu_percent, event.memory_mib
    fenced = event.state == "fenced"
    if worker.fenced != fenced:
        worker.fenced = fenced
        state.effects.dispatch = True
    if event.state == "draining":
        if worker.state is WorkerState.READY:
            drain(state, worker, "the worker itself asked for it")
    elif worker.state is WorkerState.DRAINING:  # the order was lost with its stream, or with the leader that gave it
        state.step.sends.append(SendControl(worker.id, "drain", worker.drain_argument, worker.reason))


def credit(state: State, event: WorkerCredit) -> None:
    worker = worker_of_session(state, event.session)
    if worker is not None and worker.state in ALIVE:
        set_credit(worker, event.credit)
        state.effects.capacity_freed(worker)


def progress(state: State, event: WorkerProgress) -> None:
    """Keep progress in memory: it is shown, and nothing depends on it."""
    worker = worker_of_session(state, event.session)
    if worker is None:
        return
    for keys in event.keys:
        for batch, seq in current(state, worker, keys):
            run = batch.log.run
            batch.notes[seq] = event.note[:NOTE_MAX]
            told = run.progress_note
            figures = event.figures if len(event.figures) <= FIGURES_MAX else b""
            note = ProgressNote(batch, seq, event.note[:NOTE_MAX], figures)
            if told is None or batch.log is run.root or told.batch.log is not run.root:  # what children say is less
                run.progress_note = note
            if batch.info.spec.max_worker_lost >= NO_LIMIT and batch.log is run.root:
                run.endless_notes[seq] = note
            state.step.sends.append(RunMoved(run.id))


def gone(state: State, event: WorkerGone) -> None:
    """Handle a broken stream; the deadline decides."""
    worker = state.sessions.pop(event.session, None)
    if worker is not None:
        worker.session = ""


def goodbye(state: State, event: WorkerGoodbye) -> None:
    worker = worker_of_session(state, event.session)
    if worker is None:
        return
    leave(state, worker, "goodbye", event.reason)
    items = reclaim(state, worker, "goodbye", lost=False, spare=may_run_on)
    write(state, worker)
    fields = {**named(worker), "reason": event.reason, "items": items}
    state.step.sends.append(Emit(names.WORKER_DEREGISTERED, "info", fields))


def leaving(state: State, event: WorkerLeaving) -> None:
    worker = worker_of_session(state, event.session)
    if worker is None or worker.state not in (WorkerState.READY, WorkerState.DRAINING):
        return
    worker.preempted = worker.preempted or event.preempted
    drain(state, worker, event.reason or "the worker itself asked for it")


# ---- what an operator says to it


def command(state: State, event: WorkerCommand) -> None:
    worker = state.workers.get(event.incarnation)
    if worker is None or worker.state not in (WorkerState.READY, WorkerState.DRAINING):
        error = NotFoundError(f"no live worker {event.incarnation}; `rollout workers` lists them")
        reply(state, event.request, error=error)
        return
    if event.verb == "drain":
        drain(state, worker, f"drained by {f'the {event.by}' if event.by else 'an operator'}", event.by)
        worker.drain_argument = event.argument
    state.step.sends.append(SendControl(worker.id, event.verb, event.argument, worker.reason))
    reply(state, event.request)


def drain(state: State, worker: Worker, reason: str, by: str = "") -> None:
    begins = worker.state is not WorkerState.DRAINING
    move(worker, "drain")
    worker.reason = reason
    state.effects.worker_left(worker)
    write(state, worker)
    if begins:
        fields = {**named(worker), "reason": reason, "by": by, "items": worker.in_flight}
        state.step.sends.append(Emit("worker_told_to_drain", "info", fields))


# ---- silence


def allow_for_stall(state: State) -> None:
    """Postpone every deadline by our own stall (a slow fsync, a stopped process), which is no worker's silence."""
    if state.last_mono is not None:
        stall = state.now.mono - state.last_mono - state.settings.heartbeat_interval
        if stall > 0:
            for worker in state.workers.values():
                worker.due_at += stall
    state.last_mono = state.now.mono


def scan(state: State) -> bool:
    """Find silent workers, every half interval. Returns False if it is not time yet."""
    now, settings = state.now.mono, state.settings
    tick = settings.heartbeat_interval / 2
    state.wake_by(now + tick)
    if now < state.next_scan:
        return False
    state.next_scan = now + tick
    for worker in list(state.workers.values()):
        if worker.given_back and min(worker.given_back.values()) <= now:
            worker.given_back = {some: until for some, until in worker.given_back.items() if until > now}
            state.effects.capacity_freed(worker)
        late = now - worker.due_at
        if late <= settings.coordinator_failure_timeout or late <= settings.clock_skew_budget:
            continue
        if worker.state in ALIVE:
            failed(state, worker, late)
        elif worker.batches and worker.state in LEFT:  # it left long enough ago to have fenced itself, or to have ended
            reclaim(state, worker, worker.state.value, lost=True)
        elif late > 10 * settings.orphan_grace and worker.state is not WorkerState.QUARANTINED:
            del state.workers[worker.id]  # its row stays in the ledger
    overdue(state)
    return True


def failed(state: State, worker: Worker, late: float) -> None:
    joining = worker.state is WorkerState.JOINING
    if worker.session:
        error = UnavailableError("No frame came in time; say Hello again.")
        state.step.sends.append(CloseSession(worker.session, error))
    settings = state.settings
    allowed = 2 * settings.heartbeat_interval  # see extend_deadline
    limit = allowed + max(settings.coordinator_failure_timeout, settings.clock_skew_budget)
    leave(state, worker, "silent", f"silent for {allowed + late:.1f} s, the limit is {limit:g} s")
    reclaimed = reclaim(state, worker, "worker_failed", lost=True)
    if not joining:
        write(state, worker)
    if not worker.failure_emitted:
        worker.failure_emitted = True
        fields = {**named(worker), "items": reclaimed, "reason": worker.reason}
        state.step.sends.append(Emit(names.WORKER_FAILED, "warning", fields))


def overdue(state: State) -> None:
    """End attempts whose worker does not enforce their timeout, after 2 x timeout + orphan_grace.

    A limit that was set after the assignment is enforced here. An exclusive attempt may last longer: its item waits for
    the worker's fence.
    """
    for batch in list(state.timed.values()):
        spec = batch.info.spec
        limit = 2 * spec.timeout_ms / 1000 + state.settings.orphan_grace
        lowered = spec.timeout_ms < (batch.timeout_ms or NEVER)
        if lowered:
            limit = spec.timeout_ms / 1000
        for seq, began in list(batch.started_at.items()):
            if batch.log.flight.get(seq) is not batch:
                del batch.started_at[seq]
                continue
            if state.now.mono - began <= limit or seq in batch.waiting or batch.log.run.state in ENDED:
                continue
            del batch.started_at[seq]
            if batch.worker.state not in ALIVE:
                continue  # its deadline decides
            if spec.exclusive and lowered:  # pending again once its worker says that it has stopped
                cancel(state, batch.worker, [(batch, [seq])], "timeout")
                continue
            if spec.exclusive and batch.failures + 1 < spec.max_attempts:
                key = f"{batch.log.id}/{seq}/{batch.attempt}"
                quarantine(state, batch.worker, ProtocolError(f"It did not end {key} within {limit:.0f} s, a timeout."))
                continue
            cancel(state, batch.worker, [(batch, [seq])], "timeout")
            timed_out(state, batch, seq, Failure("timeout", f"no result within {limit:.0f} s", True))


# ---- leaving


def leave(state: State, worker: Worker, cause: str, reason: str) -> None:
    move(worker, cause)
    worker.reason = reason
    worker.ended_ms = state.now.wall_ms
    state.sessions.pop(worker.session, None)
    worker.session = ""
    for run in state.runs.values():
        run.left_at.pop(worker.id, None)
    forget_revoke(state, worker)
    state.effects.worker_left(worker)


def forget_revoke(state: State, worker: Worker) -> None:
    """Forget the revoke in progress, which was answered or never will be."""
    revoke, worker.revoke = worker.revoke, None
    if revoke is not None:
        thief = state.workers.get(revoke.thief)
        if thief is not None:
            thief.incoming = max(0, thief.incoming - sum(len(k.seq) for k in revoke.keys))


def quarantine(state: State, worker: Worker, error: RolloutError) -> None:
    """Quarantine a worker that broke the protocol: this incarnation gets no more work, and what it held goes to others.
    Exclusive attempts go to others when they are over there."""
    session = worker.session
    leave(state, worker, "fault", error.message)
    extend_deadline(state, worker, state.now.mono)  # an answer may have gone out until now
    reclaim(state, worker, "quarantined", lost=True, spare=exclusive)
    write(state, worker)
    if session:
        state.step.sends.append(CloseSession(session, error))
    fields = {**named(worker), "reason": error.message}
    state.step.sends.append(Emit("worker_quarantined", "error", fields))
    known = [w.id for w in state.workers.values() if w.state is WorkerState.QUARANTINED and not w.batches]
    for oldest in known[:-QUARANTINED_MAX]:
        del state.workers[oldest]


def exclusive(batch: AttemptBatch, seq: int) -> bool:
    return batch.info.spec.exclusive


def may_run_on(batch: AttemptBatch, seq: int) -> bool:
    """Return whether a worker that said Goodbye may still run it; such a worker reported every start before."""
    return batch.info.spec.exclusive and (seq in batch.started or batch.maybe_started)


def quarantine_error(state: State, incarnation: str) -> RolloutError | None:
    """Return why nothing of a quarantined worker is acknowledged, else None."""
    worker = state.workers.get(incarnation)
    if worker is None or worker.state is not WorkerState.QUARANTINED:
        return None
    return ProtocolError(f"worker {worker.id} is quarantined: {worker.reason}. Start it anew.")
