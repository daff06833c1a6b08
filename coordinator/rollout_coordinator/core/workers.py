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
from rollout_coordinator.core.state import Grant, Run, State, Worker
from rollout_coordinator.core.step import CloseSession, Emit, Reply, SendControl, SendPause, SendWelcome, WorkerRow
from rollout_coordinator.core.tables import WORKER
from rollout_coordinator.core.window import is_accepted

ALIVE = frozenset({WorkerState.JOINING, WorkerState.READY, WorkerState.DRAINING})
LEFT = frozenset({WorkerState.QUARANTINED, WorkerState.GONE})
UNKNOWN = Inventory(capacity=())
ANY_HOST = "?"
"""Of a worker that only its open attempts speak of: its row has ended. Its Hello says where it lives."""


def write(c: State, worker: Worker) -> None:
    c.step.writes.workers[worker.id] = WorkerRow(
        worker.id, worker.host_id, worker.inventory, worker.state, worker.registered_ms, worker.ended_ms, worker.reason
    )


def heard(c: State, worker: Worker, read_at: float) -> None:
    worker.due_at = max(worker.due_at, read_at + 2 * c.settings.heartbeat_interval)


def speaking(c: State, session: str) -> Worker | None:
    """The worker whose newest session this is; None for frames of older ones, which are ignored."""
    worker = c.sessions.get(session)
    if worker is not None:
        heard(c, worker, c.now.mono)
    return worker


def join(c: State, incarnation: str, host_id: str) -> Worker:
    worker = Worker(incarnation, host_id, UNKNOWN, WorkerState.JOINING, c.now)
    c.workers[incarnation] = worker
    c.step.sends.append(Emit(names.WORKER_REGISTERED, "info", {"worker": incarnation, "host": host_id}))
    return worker


def elsewhere(worker: Worker, host_id: str) -> bool:
    """Somebody on another host speaks in its name."""
    return worker.host_id not in (host_id, ANY_HOST)


def beat(c: State, event: WorkerBeat) -> None:
    worker = c.workers.get(event.incarnation)
    if worker is None:
        worker = join(c, event.incarnation, event.host_id)
        c.step.sends.append(Emit(names.WORKER_HEARTBEAT, "info", {"worker": worker.id}))
    if worker.state not in ALIVE or elsewhere(worker, event.host_id):
        return
    heard(c, worker, event.read_at)
    worker.load = event.load
    fenced = event.state == "fenced"
    if worker.fenced != fenced:
        worker.fenced = fenced
        c.dirty = True
    if event.state == "draining":
        if worker.state is WorkerState.READY:
            drain(c, worker, "the worker said so")
    elif worker.state is WorkerState.DRAINING:  # the order was lost with its stream, or with the leader that gave it
        c.step.sends.append(SendControl(worker.id, "drain", worker.drain_argument))


def hello(c: State, event: WorkerHello) -> None:
    worker = c.workers.get(event.incarnation)
    if worker is None:
        worker = join(c, event.incarnation, event.host_id)
    if elsewhere(worker, event.host_id):
        error = ProtocolError(
            f"worker {worker.id} lives on host {worker.host_id or '(none)'}, not on {event.host_id or '(none)'}. Start "
            "it anew, without --worker-id, for an incarnation of its own."
        )
        c.step.sends.append(CloseSession(event.session, error))
        return
    if worker.state in (WorkerState.QUARANTINED, WorkerState.GONE):
        error = ProtocolError(f"worker {worker.id} is {worker.state.value}: {worker.reason}. Start it anew.")
        c.step.sends.append(CloseSession(event.session, error))
        return
    if worker.session and worker.session != event.session:
        c.sessions.pop(worker.session, None)
        c.step.sends.append(CloseSession(worker.session, UnavailableError("A newer session of this worker took over.")))
    before = worker.state
    worker.state = WORKER.move(before, "hello_draining" if event.draining else "hello")
    worker.session = event.session
    c.sessions[event.session] = worker
    worker.host_id = event.host_id
    worker.set_inventory(event.inventory)
    set_credit(worker, event.credit)
    worker.fenced = False
    worker.reason = ""
    worker.ended_ms = 0
    worker.due_at = c.now.mono
    heard(c, worker, c.now.mono)
    steal.forget(c, worker)
    write(c, worker)
    reconcile(c, worker, event)
    for run in c.runs.values():
        if run.id not in worker.by_run:
            continue
        if run.state in ENDED:  # the order may have been lost with the stream before
            cancel_survivors(c, run, worker)
        elif run.pausing_until_ms:
            c.step.sends.append(SendPause(worker.session, run.id, max(0, run.pausing_until_ms - c.now.wall_ms)))
    if before is not worker.state:
        c.step.sends.append(
            Emit(names.WORKER_READY, "info", {"worker": worker.id, "host": worker.host_id, "state": worker.state.value})
        )
    c.hungry[worker.id] = worker
    c.dirty = True


def reconcile(c: State, worker: Worker, event: WorkerHello) -> None:
    """Keep, drop, resend, accepted: what becomes of everything that either side believes the worker has."""
    started = {(k.log, seq, attempt) for k in event.started for seq, attempt in zip(k.seq, k.attempt, strict=True)}
    listed: set[tuple[int, int]] = set()
    answer = SendWelcome(event.session, [], [], [], [])
    c.step.sends.append(answer)  # before it is complete: what follows may cancel attempts, and Welcome comes first
    for keys in event.held:
        keep, drop = Keys(keys.log, [], []), Keys(keys.log, [], [])
        now_open = {seq: grant for grant, seq in results.current(c, worker, keys)}
        for seq, attempt in zip(keys.seq, keys.attempt, strict=True):
            grant = now_open.get(seq)
            put = drop
            if grant is not None and grant.attempt == attempt:
                put = keep
                listed.add((keys.log, seq))
                resume(c, grant, seq, (keys.log, seq, attempt) in started)
            put.seq.append(seq)
            put.attempt.append(attempt)
        answer.keep += [keep] if keep.seq else []
        answer.drop += [drop] if drop.seq else []
    for keys in event.unacknowledged:
        unacknowledged(c, worker, keys, answer, listed)
    missing = 0
    for grant in list(worker.grants.values()):
        for seq in open_seqs(grant):
            if (grant.log.id, seq) not in listed and grant.log.flight.get(seq) is grant:
                not_held(c, grant, seq, "not_held", "its worker said Hello without it")
                missing += 1
    if missing:
        drop_ended(c, worker, answer)
    tell_reconciled(c, worker, answer, missing)


def cancel_survivors(c: State, run: Run, worker: Worker) -> None:
    held = [(grant, open_seqs(grant)) for grant in worker.grants.values() if grant.log.run is run]
    cancel(worker, held, f"run {run.state.value}", c.step.sends)


def drop_ended(c: State, worker: Worker, answer: SendWelcome) -> None:
    """What stood on an attempt that its worker did not bring has ended with it, and is not kept after all."""
    for kept in (answer.keep, answer.resend):
        for keys in kept:
            still = {seq for _, seq in results.current(c, worker, keys)}
            ended = [(s, a) for s, a in zip(keys.seq, keys.attempt, strict=True) if s not in still]
            if ended:
                left = [(s, a) for s, a in zip(keys.seq, keys.attempt, strict=True) if s in still]
                answer.drop.append(Keys(keys.log, [s for s, _ in ended], [a for _, a in ended]))
                keys.seq[:], keys.attempt[:] = [s for s, _ in left], [a for _, a in left]
        kept[:] = [keys for keys in kept if keys.seq]


def tell_reconciled(c: State, worker: Worker, answer: SendWelcome, missing: int) -> None:
    """What became of every attempt that either side believed open; silent for a worker that had none."""
    counts = {
        "kept": sum(len(k.seq) for k in answer.keep),
        "resend": sum(len(k.seq) for k in answer.resend),
        "accepted": sum(len(k.seq) for k in answer.accepted),
        "dropped": sum(len(k.seq) for k in answer.drop),
        "repended": missing,
    }
    if any(counts.values()):
        c.step.sends.append(Emit("worker_reconciled", "info", {"worker": worker.id, **counts}))


def resume(c: State, grant: Grant, seq: int, started: bool) -> None:
    """A kept attempt: take its worker's word for whether it runs. A parent says Waiting again."""
    from rollout_coordinator.core.spawn import stop_waiting

    stop_waiting(c, grant, seq)
    if started:
        begun(c, grant, seq)
    else:
        grant.started_at.pop(seq, None)  # since a replay, which did not know better
    grant.unsure = False


def unacknowledged(c: State, worker: Worker, keys: Keys, answer: SendWelcome, listed: set[tuple[int, int]]) -> None:
    resend, accepted, drop = Keys(keys.log, [], []), Keys(keys.log, [], []), Keys(keys.log, [], [])
    log = c.logs.get(keys.log)
    now_open = {seq for _, seq in results.current(c, worker, keys)}
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


def not_held(c: State, grant: Grant, seq: int, code: str, message: str) -> None:
    """Believed held, but the same incarnation does not have it: never received, or killed when it fenced itself.

    That is no loss of a worker, except where a second run of the item would do harm.
    """
    spec = grant.info.spec
    if spec.fail_on_worker_lost and (grant.unsure or seq in grant.started):
        lose(c, grant, seq, code)
    else:
        end_attempt(c, grant, seq, AttemptEnd.RELEASED, code, message)


def lose(c: State, grant: Grant, seq: int, code: str) -> None:
    """A started attempt died with its worker."""
    final = results.loss_is_final(grant) if grant.log.run.state not in ENDED else None
    if final is None:
        end_attempt(c, grant, seq, AttemptEnd.WORKER_LOST, code, f"worker {grant.worker.id} was lost")
        return
    grant.log.worker_lost += 1
    c.totals["worker_lost"] += 1
    results.close_failed(c, grant, seq, Failure(final.code, f"{final.message} Last: {grant.worker.id}", False, True))


def take_back(
    c: State, worker: Worker, code: str, lost: bool, spare: Callable[[Grant, int], bool] | None = None
) -> int:  # fmt: skip
    """Everything the worker held, but what is spared, is pending again, or has failed for good."""
    n = 0
    for grant in list(worker.grants.values()):
        for seq in open_seqs(grant):
            if grant.log.flight.get(seq) is not grant or (spare is not None and spare(grant, seq)):
                continue  # the former: dropped with its predecessor
            n += 1
            began = seq in grant.started or (grant.unsure and grant.info.spec.fail_on_worker_lost)
            if lost and began:
                lose(c, grant, seq, code)
            else:
                end_attempt(c, grant, seq, AttemptEnd.RELEASED, code, f"not started on {worker.id}")
    return n


def leave(c: State, worker: Worker, cause: str, reason: str) -> None:
    worker.state = WORKER.move(worker.state, cause)
    worker.reason = reason
    worker.ended_ms = c.now.wall_ms
    c.sessions.pop(worker.session, None)
    worker.session = ""
    steal.forget(c, worker)
    c.hungry.pop(worker.id, None)
    c.resting.pop(worker.id, None)


def allow_for_stall(c: State) -> None:
    """Our own stall (a slow fsync, a stopped process) is nobody's silence: it moves every deadline."""
    if c.last_mono is not None:
        stall = c.now.mono - c.last_mono - c.settings.heartbeat_interval
        if stall > 0:
            for worker in c.workers.values():
                worker.due_at += stall
    c.last_mono = c.now.mono


def scan(c: State) -> None:
    """Find the silent, every half interval."""
    now, settings = c.now.mono, c.settings
    tick = settings.heartbeat_interval / 2
    c.wake_by(now + tick)
    if now < c.next_scan:
        return
    c.next_scan = now + tick
    c.steal_due = True
    for worker in list(c.workers.values()):
        late = now - worker.due_at
        if late <= settings.coordinator_failure_timeout or late <= settings.clock_skew_budget:
            continue
        if worker.state in ALIVE:
            failed(c, worker, late)
        elif worker.grants and worker.state in LEFT:
            quarantine.over_by_now(c, worker)
        elif late > 10 * settings.orphan_grace and worker.state is not WorkerState.QUARANTINED:
            del c.workers[worker.id]  # its row stays in the ledger
    quarantine.overdue(c)


def failed(c: State, worker: Worker, late: float) -> None:
    joining = worker.state is WorkerState.JOINING
    if worker.session:
        c.step.sends.append(CloseSession(worker.session, UnavailableError("No frame came in time; say Hello again.")))
    leave(c, worker, "silent", f"silent for {late + 2 * c.settings.heartbeat_interval:.1f} s")
    items = take_back(c, worker, "worker_failed", lost=True)
    if not joining:
        write(c, worker)
    if not worker.told_failed:
        worker.told_failed = True
        fields = {"worker": worker.id, "host": worker.host_id, "items": items, "reason": worker.reason}
        c.step.sends.append(Emit(names.WORKER_FAILED, "warning", fields))


def gone(c: State, event: WorkerGone) -> None:
    """The stream broke; the deadline decides."""
    worker = c.sessions.pop(event.session, None)
    if worker is not None:
        worker.session = ""


def goodbye(c: State, event: WorkerGoodbye) -> None:
    worker = speaking(c, event.session)
    if worker is None:
        return
    leave(c, worker, "goodbye", event.reason)
    take_back(c, worker, "goodbye", lost=False, spare=quarantine.may_run)
    write(c, worker)
    c.step.sends.append(
        Emit(names.WORKER_DEREGISTERED, "info", {"worker": worker.id, "host": worker.host_id, "reason": event.reason})
    )


def drain(c: State, worker: Worker, reason: str) -> None:
    worker.state = WORKER.move(worker.state, "drain")
    worker.reason = reason
    c.hungry.pop(worker.id, None)
    c.resting.pop(worker.id, None)
    write(c, worker)


def set_credit(worker: Worker, credit: object) -> None:
    from rollout.model.worker import Credit

    assert isinstance(credit, Credit)
    worker.credit = credit
    worker.credit_runs = dict(credit.run_items)


def credit(c: State, event: WorkerCredit) -> None:
    worker = speaking(c, event.session)
    if worker is not None and worker.state in ALIVE:
        set_credit(worker, event.credit)
        c.hungry[worker.id] = worker
        c.dirty = True


def progress(c: State, event: WorkerProgress) -> None:
    speaking(c, event.session)


def command(c: State, event: WorkerCommand) -> None:
    worker = c.workers.get(event.incarnation)
    if worker is None or worker.state not in (WorkerState.READY, WorkerState.DRAINING):
        error = NotFoundError(f"no live worker {event.incarnation}; `rollout workers` lists them")
        c.step.sends.append(Reply(event.request, None, error))
        return
    if event.verb == "drain":
        drain(c, worker, event.argument or "operator")
        worker.drain_argument = event.argument
    c.step.sends.append(SendControl(worker.id, event.verb, event.argument))
    c.step.sends.append(Reply(event.request, None))
