"""Hello: a worker opens a stream, and both sides agree on what it holds.

Keep, drop, resend, accepted: the answer decides on everything that either side believes the worker has. A lost
assignment, a broken connection, and a leader that dies between a revoke and its confirmation thus heal without a
timeout.
"""

from __future__ import annotations

from typing import Any

from rollout.model import events as names
from rollout.model.errors import ProtocolError, UnavailableError
from rollout.model.run import ENDED
from rollout.model.worker import WorkerState

from rollout_coordinator.core import attempts
from rollout_coordinator.core.events import Keys, WorkerHello
from rollout_coordinator.core.failures import not_held
from rollout_coordinator.core.items import is_accepted
from rollout_coordinator.core.state import AttemptBatch, Run, State, Worker
from rollout_coordinator.core.step import CloseSession, Emit, SendPause, SendWelcome
from rollout_coordinator.core.transitions import RunPhase
from rollout_coordinator.core.workers import (
    extend_deadline,
    forget_revoke,
    join,
    move,
    named,
    on_another_host,
    set_credit,
    write,
)


def hello(state: State, event: WorkerHello) -> None:
    worker = state.workers.get(event.incarnation)
    if worker is None:
        worker = join(state, event.incarnation, event.host_id)
    refusal = _refusal(state, worker, event)
    if refusal is not None:
        state.step.sends.append(CloseSession(event.session, refusal))
        return
    if worker.session and worker.session != event.session:
        state.sessions.pop(worker.session, None)
        error = UnavailableError("A newer session of this worker took over.")
        state.step.sends.append(CloseSession(worker.session, error))
    before, lost_ms = worker.state, worker.ended_ms
    move(worker, "hello_draining" if event.draining else "hello")
    worker.session = event.session
    state.sessions[event.session] = worker
    worker.host_id, worker.address = event.host_id, event.address
    worker.set_inventory(event.inventory)
    set_credit(worker, event.credit)
    worker.fenced = False
    worker.preempted = worker.preempted or event.preempted
    worker.reason = ""
    worker.ended_ms = 0
    worker.due_at = state.now.mono
    extend_deadline(state, worker, state.now.mono)
    forget_revoke(state, worker)
    write(state, worker)
    reconcile(state, worker, event)
    for run in state.runs.values():
        if run.id not in worker.by_run:
            continue
        if run.state in ENDED:  # the order may have been lost with the stream before
            cancel_survivors(state, run, worker)
        elif run.phase is RunPhase.PAUSING:
            left_ms = max(0, run.pausing_until_ms - state.now.wall_ms)
            state.step.sends.append(SendPause(worker.session, run.id, left_ms))
    if before is not worker.state:
        fields: dict[str, Any] = {**named(worker), "state": worker.state.value}
        if before is WorkerState.FAILED:
            fields["lost_s"] = round((state.now.wall_ms - lost_ms) / 1000, 1)
        elif before is WorkerState.JOINING:
            fields["replaces"] = takes_the_place_of(state, worker)
        state.step.sends.append(Emit(names.WORKER_READY, "info", fields))
    state.effects.capacity_freed(worker)


def takes_the_place_of(state: State, worker: Worker) -> str:
    """Return the worker of the same machine that was lost last and not yet replaced. For people."""
    machine = (worker.host_id, worker.inventory.host)
    lost = [
        other
        for other in state.workers.values()
        if other.state is WorkerState.FAILED and not other.replaced and (other.host_id, other.inventory.host) == machine
    ]
    if not lost:
        return ""
    last = max(lost, key=lambda other: other.ended_ms)
    last.replaced = True
    return last.id


def _refusal(state: State, worker: Worker, event: WorkerHello) -> ProtocolError | None:
    if on_another_host(state, worker, event.host_id):
        return ProtocolError(
            f"worker {worker.id} lives on host {worker.host_id or '(none)'}, not on {event.host_id or '(none)'}. Start "
            "it anew, without --worker-id, for an incarnation of its own."
        )
    if worker.state in (WorkerState.QUARANTINED, WorkerState.GONE):
        return ProtocolError(f"worker {worker.id} is {worker.state.value}: {worker.reason}. Start it anew.")
    return None


def reconcile(state: State, worker: Worker, event: WorkerHello) -> None:
    """Answer with a Welcome that decides on each attempt."""
    started = {(k.log, seq, attempt) for k in event.started for seq, attempt in zip(k.seq, k.attempt, strict=True)}
    listed: set[tuple[int, int]] = set()
    answer = SendWelcome(event.session, [], [], [], [])
    state.step.sends.append(answer)  # before it is complete: what follows may cancel attempts, and Welcome comes first
    kept: dict[int, AttemptBatch] = {}
    for keys in event.held:
        keep, drop = Keys(keys.log, [], []), Keys(keys.log, [], [])
        now_open = {seq: batch for batch, seq in attempts.current(state, worker, keys)}
        for seq, attempt in zip(keys.seq, keys.attempt, strict=True):
            batch = now_open.get(seq)
            put = drop
            if batch is not None and batch.attempt == attempt:
                put = keep
                listed.add((keys.log, seq))
                resume(state, batch, seq, (keys.log, seq, attempt) in started)
                kept[batch.id] = batch
            put.seq.append(seq)
            put.attempt.append(attempt)
        answer.keep += [keep] if keep.seq else []
        answer.drop += [drop] if drop.seq else []
    for keys in event.unacknowledged:
        unacknowledged(state, worker, keys, answer, listed)
    missing = 0
    for batch in list(worker.batches.values()):
        for seq in attempts.open_seqs(batch):
            if (batch.log.id, seq) not in listed and batch.log.flight.get(seq) is batch:
                not_held(state, batch, seq, "not_held", "its worker said Hello without it")
                missing += 1
    for batch in kept.values():  # not before: those of it that are missing may have started
        batch.maybe_started = False
    if missing:
        drop_ended(state, worker, answer)
    tell_reconciled(state, worker, answer, missing)


def resume(state: State, batch: AttemptBatch, seq: int, started: bool) -> None:
    """Keep an attempt; its worker says whether it runs, and a parent sends Waiting again."""
    attempts.stop_waiting(batch, seq)
    if started:
        attempts.start(state, batch, [seq])
    else:
        batch.started_at.pop(seq, None)  # since a replay, which did not know better


def unacknowledged(state: State, worker: Worker, keys: Keys, answer: SendWelcome, listed: set[tuple[int, int]]) -> None:
    """Answer for results that the worker sent and does not know to be durable."""
    resend, accepted, drop = Keys(keys.log, [], []), Keys(keys.log, [], []), Keys(keys.log, [], [])
    log = state.logs.get(keys.log)
    now_open = {seq for _, seq in attempts.current(state, worker, keys)}
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


def drop_ended(state: State, worker: Worker, answer: SendWelcome) -> None:
    """Drop pipelined attempts whose predecessor ended because its worker did not bring it."""
    for kept in (answer.keep, answer.resend):
        for keys in kept:
            still = {seq for _, seq in attempts.current(state, worker, keys)}
            ended = [(s, a) for s, a in zip(keys.seq, keys.attempt, strict=True) if s not in still]
            if ended:
                left = [(s, a) for s, a in zip(keys.seq, keys.attempt, strict=True) if s in still]
                answer.drop.append(Keys(keys.log, [s for s, _ in ended], [a for _, a in ended]))
                keys.seq[:], keys.attempt[:] = [s for s, _ in left], [a for _, a in left]
        kept[:] = [keys for keys in kept if keys.seq]


def cancel_survivors(state: State, run: Run, worker: Worker) -> None:
    held = [(batch, attempts.open_seqs(batch)) for batch in worker.batches.values() if batch.log.run is run]
    attempts.cancel(state, worker, held, f"run {run.state.value}")


def tell_reconciled(state: State, worker: Worker, answer: SendWelcome, missing: int) -> None:
    """Report the decision on every attempt that either side believed open; silent for a worker without any."""
    counts = {
        "kept": sum(len(k.seq) for k in answer.keep),
        "resend": sum(len(k.seq) for k in answer.resend),
        "accepted": sum(len(k.seq) for k in answer.accepted),
        "dropped": sum(len(k.seq) for k in answer.drop),
        "repended": missing,
    }
    if any(counts.values()):
        state.step.sends.append(Emit("worker_reconciled", "info", {**named(worker), **counts}))
