"""Workers: hello and reconciliation, liveness, drain, goodbye.

One mechanism finds the dead: a deadline, moved by every frame that was read. Its passing emits `worker_failed` and
re-pends the work in the same step.
"""

from __future__ import annotations

from collections.abc import Callable

from rollout.model import events as names
from rollout.model.errors import NotFoundError, ProtocolError, UnavailableError
from rollout.model.item import AttemptEnd, Failure
from rollout.model.run import ENDED
from rollout.model.worker import Inventory, WorkerState

from rollout_coordinator.core import quarantine, results, steal
from rollout_coordinator.core.attempts import begun, cancel, end_attempt, open_seqs
from rollout_coordinator.core.events import (
    Keys,
    WorkerBeat,
    WorkerCommand,
    WorkerCredit,
    WorkerGone,
    WorkerGoodbye,
    WorkerHello,
    WorkerProgress,
)
from rollout_coordinator.core.state import AttemptBatch, Run, State, Worker
from rollout_coordinator.core.step import CloseSession, Emit, Reply, SendControl, SendPause, SendWelcome, WorkerRow
from rollout_coordinator.core.transitions import WORKER
from rollout_coordinator.core.window import is_accepted

ALIVE = frozenset({WorkerState.JOINING, WorkerState.READY, WorkerState.DRAINING})
LEFT = frozenset({WorkerState.QUARANTINED, WorkerState.GONE})
UNKNOWN = Inventory(capacity=())
ANY_HOST = "?"
"""Of a worker that only its open attempts speak of: its row has ended. Its Hello says where it lives."""


def write(state: State, worker: Worker) -> None:
    state.step.writes.workers[worker.id] = WorkerRow(
        worker.id, worker.host_id, worker.inventory, worker.state, worker.registered_ms, worker.ended_ms, worker.reason
    )


def extend_deadline(state: State, worker: Worker, read_at: float) -> None:
    worker.due_at = max(worker.due_at, read_at + 2 * state.settings.heartbeat_interval)


def worker_of_session(state: State, session: str) -> Worker | None:
    """The worker whose newest session this is; None for frames of older ones, which are ignored."""
    worker = state.sessions.get(session)
    if worker is not None:
        extend_deadline(state, worker, state.now.mono)
    return worker


def join(state: State, incarnation: str, host_id: str) -> Worker:
    worker = Worker(incarnation, host_id, UNKNOWN, WorkerState.JOINING, state.now)
    state.workers[incarnation] = worker
    state.step.sends.append(Emit(names.WORKER_REGISTERED, "info", {"worker": incarnation, "host": host_id}))
    return worker


def on_another_host(worker: Worker, host_id: str) -> bool:
    """Somebody on another host speaks in its name."""
    return worker.host_id not in (host_id, ANY_HOST)


def beat(state: State, event: WorkerBeat) -> None:
    worker = state.workers.get(event.incarnation)
    if worker is None:
        worker = join(state, event.incarnation, event.host_id)
        state.step.sends.append(Emit(names.WORKER_HEARTBEAT, "info", {"worker": worker.id}))
    if worker.state not in ALIVE or on_another_host(worker, event.host_id):
        return
    extend_deadline(state, worker, event.read_at)
    worker.load = event.load
    fenced = event.state == "fenced"
    if worker.fenced != fenced:
        worker.fenced = fenced
        state.dirty = True
    if event.state == "draining":
        if worker.state is WorkerState.READY:
            drain(state, worker, "the worker said so")
    elif worker.state is WorkerState.DRAINING:  # the order was lost with its stream, or with the leader that gave it
        state.step.sends.append(SendControl(worker.id, "drain", worker.drain_argument))


def hello(state: State, event: WorkerHello) -> None:
    worker = state.workers.get(event.incarnation)
    if worker is None:
        worker = join(state, event.incarnation, event.host_id)
    if on_another_host(worker, event.host_id):
        error = ProtocolError(
            f"worker {worker.id} lives on host {worker.host_id or '(none)'}, not on {event.host_id or '(none)'}. Start "
            "it anew, without --worker-id, for an incarnation of its own."
        )
        state.step.sends.append(CloseSession(event.session, error))
        return
    if worker.state in (WorkerState.QUARANTINED, WorkerState.GONE):
        error = ProtocolError(f"worker {worker.id} is {worker.state.value}: {worker.reason}. Start it anew.")
        state.step.sends.append(CloseSession(event.session, error))
        return
    if worker.session and worker.session != event.session:
        state.sessions.pop(worker.session, None)
        state.step.sends.append(
            CloseSession(worker.session, UnavailableError("A newer session of this worker took over."))
        )
    before = worker.state
    worker.state = WORKER.move(before, "hello_draining" if event.draining else "hello")
    worker.session = event.session
    state.sessions[event.session] = worker
    worker.host_id = event.host_id
    worker.set_inventory(event.inventory)
    set_credit(worker, event.credit)
    worker.fenced = False
    worker.reason = ""
    worker.ended_ms = 0
    worker.due_at = state.now.mono
    extend_deadline(state, worker, state.now.mono)
    steal.forget(state, worker)
    write(state, worker)
    reconcile(state, worker, event)
    for run in state.runs.values():
        if run.id not in worker.by_run:
            continue
        if run.state in ENDED:  # the order may have been lost with the stream before
            cancel_survivors(state, run, worker)
        elif run.pausing_until_ms:
            state.step.sends.append(SendPause(worker.session, run.id, max(0, run.pausing_until_ms - state.now.wall_ms)))
    if before is not worker.state:
        state.step.sends.append(
            Emit(names.WORKER_READY, "info", {"worker": worker.id, "host": worker.host_id, "state": worker.state.value})
        )
    state.asking[worker.id] = worker
    state.dirty = True


def reconcile(state: State, worker: Worker, event: WorkerHello) -> None:
    """Keep, drop, resend, accepted: what becomes of everything that either side believes the worker has."""
    started = {(k.log, seq, attempt) for k in event.started for seq, attempt in zip(k.seq, k.attempt, strict=True)}
    listed: set[tuple[int, int]] = set()
    answer = SendWelcome(event.session, [], [], [], [])
    state.step.sends.append(answer)  # before it is complete: what follows may cancel attempts, and Welcome comes first
    for keys in event.held:
        keep, drop = Keys(keys.log, [], []), Keys(keys.log, [], [])
        now_open = {seq: batch for batch, seq in results.current(state, worker, keys)}
        for seq, attempt in zip(keys.seq, keys.attempt, strict=True):
            batch = now_open.get(seq)
            put = drop
            if batch is not None and batch.attempt == attempt:
                put = keep
                listed.add((keys.log, seq))
                resume(state, batch, seq, (keys.log, seq, attempt) in started)
            put.seq.append(seq)
            put.attempt.append(attempt)
        answer.keep += [keep] if keep.seq else []
        answer.drop += [drop] if drop.seq else []
    for keys in event.unacknowledged:
        unacknowledged(state, worker, keys, answer, listed)
    missing = 0
    for batch in list(worker.batches.values()):
        for seq in open_seqs(batch):
            if (batch.log.id, seq) not in listed and batch.log.flight.get(seq) is batch:
                not_held(state, batch, seq, "not_held", "its worker said Hello without it")
                missing += 1
    if missing:
        drop_ended(state, worker, answer)
    tell_reconciled(state, worker, answer, missing)


def cancel_survivors(state: State, run: Run, worker: Worker) -> None:
    held = [(batch, open_seqs(batch)) for batch in worker.batches.values() if batch.log.run is run]
    cancel(worker, held, f"run {run.state.value}", state.step.sends)


def drop_ended(state: State, worker: Worker, answer: SendWelcome) -> None:
    """What stood on an attempt that its worker did not bring has ended with it, and is not kept after all."""
    for kept in (answer.keep, answer.resend):
        for keys in kept:
            still = {seq for _, seq in results.current(state, worker, keys)}
            ended = [(s, a) for s, a in zip(keys.seq, keys.attempt, strict=True) if s not in still]
            if ended:
                left = [(s, a) for s, a in zip(keys.seq, keys.attempt, strict=True) if s in still]
                answer.drop.append(Keys(keys.log, [s for s, _ in ended], [a for _, a in ended]))
                keys.seq[:], keys.attempt[:] = [s for s, _ in left], [a for _, a in left]
        kept[:] = [keys for keys in kept if keys.seq]


def tell_reconciled(state: State, worker: Worker, answer: SendWelcome, missing: int) -> None:
    """What became of every attempt that either side believed open; silent for a worker that had none."""
    counts = {
        "kept": sum(len(k.seq) for k in answer.keep),
        "resend": sum(len(k.seq) for k in answer.resend),
        "accepted": sum(len(k.seq) for k in answer.accepted),
        "dropped": sum(len(k.seq) for k in answer.drop),
        "repended": missing,
    }
    if any(counts.values()):
        state.step.sends.append(Emit("worker_reconciled", "info", {"worker": worker.id, **counts}))


def resume(state: State, batch: AttemptBatch, seq: int, started: bool) -> None:
    """A kept attempt: take its worker's word for whether it runs. A parent says Waiting again."""
    from rollout_coordinator.core.child_items import stop_waiting

    stop_waiting(state, batch, seq)
    if started:
        begun(state, batch, seq)
    else:
        batch.started_at.pop(seq, None)  # since a replay, which did not know better
    batch.maybe_started = False


def unacknowledged(state: State, worker: Worker, keys: Keys, answer: SendWelcome, listed: set[tuple[int, int]]) -> None:
    resend, accepted, drop = Keys(keys.log, [], []), Keys(keys.log, [], []), Keys(keys.log, [], [])
    log = state.logs.get(keys.log)
    now_open = {seq for _, seq in results.current(state, worker, keys)}
    for seq, attempt in zip(keys.seq, keys.attempt, strict=True):
        if seq in now_open:
            put = resend
            listed.add((keys.log, seq))
        elif log is not None and is_accepted(log, seq):
            put = accepted  # durable, be it this attempt's or another's: the worker may forget its copy
        else:
            put = drop
        put.seq.append(seq)
        put.attempt.append(attempt)
    answer.resend += [resend] if resend.seq else []
    answer.accepted += [accepted] if accepted.seq else []
    answer.drop += [drop] if drop.seq else []


def not_held(state: State, batch: AttemptBatch, seq: int, code: str, message: str) -> None:
    """Believed held, but the same incarnation does not have it: never received, or killed when it fenced itself.

    That is no loss of a worker, except where a second run of the item would do harm.
    """
    spec = batch.info.spec
    if spec.fail_on_worker_lost and (batch.maybe_started or seq in batch.started):
        worker_lost_it(state, batch, seq, code)
    else:
        end_attempt(state, batch, seq, AttemptEnd.RELEASED, code, message)


def worker_lost_it(state: State, batch: AttemptBatch, seq: int, code: str) -> None:
    """A started attempt died with its worker."""
    final = results.loss_is_final(batch) if batch.log.run.state not in ENDED else None
    if final is None:
        end_attempt(state, batch, seq, AttemptEnd.WORKER_LOST, code, f"worker {batch.worker.id} was lost")
        return
    batch.log.worker_lost += 1
    state.totals["worker_lost"] += 1
    results.close_failed(
        state, batch, seq, Failure(final.code, f"{final.message} Last: {batch.worker.id}", False, True)
    )


def reclaim(
    state: State, worker: Worker, code: str, lost: bool, spare: Callable[[AttemptBatch, int], bool] | None = None
) -> int:  # fmt: skip
    """Everything the worker held, but what is spared, is pending again, or has failed for good."""
    n = 0
    for batch in list(worker.batches.values()):
        for seq in open_seqs(batch):
            if batch.log.flight.get(seq) is not batch or (spare is not None and spare(batch, seq)):
                continue  # the former: dropped with its predecessor
            n += 1
            began = seq in batch.started or (batch.maybe_started and batch.info.spec.fail_on_worker_lost)
            if lost and began:
                worker_lost_it(state, batch, seq, code)
            else:
                end_attempt(state, batch, seq, AttemptEnd.RELEASED, code, f"not started on {worker.id}")
    return n


def leave(state: State, worker: Worker, cause: str, reason: str) -> None:
    worker.state = WORKER.move(worker.state, cause)
    worker.reason = reason
    worker.ended_ms = state.now.wall_ms
    state.sessions.pop(worker.session, None)
    worker.session = ""
    steal.forget(state, worker)
    state.asking.pop(worker.id, None)
    state.resting.pop(worker.id, None)


def allow_for_stall(state: State) -> None:
    """Our own stall (a slow fsync, a stopped process) is nobody's silence: it moves every deadline."""
    if state.last_mono is not None:
        stall = state.now.mono - state.last_mono - state.settings.heartbeat_interval
        if stall > 0:
            for worker in state.workers.values():
                worker.due_at += stall
    state.last_mono = state.now.mono


def scan(state: State) -> None:
    """Find the silent, every half interval."""
    now, settings = state.now.mono, state.settings
    tick = settings.heartbeat_interval / 2
    state.wake_by(now + tick)
    if now < state.next_scan:
        return
    state.next_scan = now + tick
    state.steal_due = True
    for worker in list(state.workers.values()):
        late = now - worker.due_at
        if late <= settings.coordinator_failure_timeout or late <= settings.clock_skew_budget:
            continue
        if worker.state in ALIVE:
            failed(state, worker, late)
        elif worker.batches and worker.state in LEFT:
            quarantine.over_by_now(state, worker)
        elif late > 10 * settings.orphan_grace and worker.state is not WorkerState.QUARANTINED:
            del state.workers[worker.id]  # its row stays in the ledger
    quarantine.overdue(state)


def failed(state: State, worker: Worker, late: float) -> None:
    joining = worker.state is WorkerState.JOINING
    if worker.session:
        state.step.sends.append(
            CloseSession(worker.session, UnavailableError("No frame came in time; say Hello again."))
        )
    leave(state, worker, "silent", f"silent for {late + 2 * state.settings.heartbeat_interval:.1f} s")
    items = reclaim(state, worker, "worker_failed", lost=True)
    if not joining:
        write(state, worker)
    if not worker.failure_emitted:
        worker.failure_emitted = True
        fields = {"worker": worker.id, "host": worker.host_id, "items": items, "reason": worker.reason}
        state.step.sends.append(Emit(names.WORKER_FAILED, "warning", fields))


def gone(state: State, event: WorkerGone) -> None:
    """The stream broke; the deadline decides."""
    worker = state.sessions.pop(event.session, None)
    if worker is not None:
        worker.session = ""


def goodbye(state: State, event: WorkerGoodbye) -> None:
    worker = worker_of_session(state, event.session)
    if worker is None:
        return
    leave(state, worker, "goodbye", event.reason)
    reclaim(state, worker, "goodbye", lost=False, spare=quarantine.may_run)
    write(state, worker)
    state.step.sends.append(
        Emit(names.WORKER_DEREGISTERED, "info", {"worker": worker.id, "host": worker.host_id, "reason": event.reason})
    )


def drain(state: State, worker: Worker, reason: str) -> None:
    worker.state = WORKER.move(worker.state, "drain")
    worker.reason = reason
    state.asking.pop(worker.id, None)
    state.resting.pop(worker.id, None)
    write(state, worker)


def set_credit(worker: Worker, credit: object) -> None:
    from rollout.model.worker import Credit

    assert isinstance(credit, Credit)
    worker.credit = credit
    worker.credit_runs = dict(credit.run_items)


def credit(state: State, event: WorkerCredit) -> None:
    worker = worker_of_session(state, event.session)
    if worker is not None and worker.state in ALIVE:
        set_credit(worker, event.credit)
        state.asking[worker.id] = worker
        state.dirty = True


def progress(state: State, event: WorkerProgress) -> None:
    worker_of_session(state, event.session)


def command(state: State, event: WorkerCommand) -> None:
    worker = state.workers.get(event.incarnation)
    if worker is None or worker.state not in (WorkerState.READY, WorkerState.DRAINING):
        error = NotFoundError(f"no live worker {event.incarnation}; `rollout workers` lists them")
        state.step.sends.append(Reply(event.request, None, error))
        return
    if event.verb == "drain":
        drain(state, worker, event.argument or "operator")
        worker.drain_argument = event.argument
    state.step.sends.append(SendControl(worker.id, event.verb, event.argument))
    state.step.sends.append(Reply(event.request, None))
