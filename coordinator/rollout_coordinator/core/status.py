"""Status of the core: views for people and gauges for metrics."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest
from itertools import chain, islice

from rollout.model.run import RunState

from rollout_coordinator.core import causes
from rollout_coordinator.core.attempts import open_seqs
from rollout_coordinator.core.events import Now
from rollout_coordinator.core.items import is_accepted
from rollout_coordinator.core.pending_reasons import pending_reasons
from rollout_coordinator.core.rates import rates
from rollout_coordinator.core.runs import live
from rollout_coordinator.core.state import AttemptBatch, Log, ProgressNote, Run, State, Worker
from rollout_coordinator.core.transitions import RestState, RunPhase
from rollout_coordinator.core.views import (
    HeldView,
    LaneView,
    RunView,
    RunWorkerView,
    WorkerDetail,
    WorkerRunView,
    WorkerView,
)

BETWEEN_S = 2.0
"""Seconds for which a worker that ended all its items of a run still counts, because the next batch is in transit."""


def run_view(state: State, run: Run, *, with_waits: bool = False) -> RunView:
    """Return a run's view. `with_waits` visits every queue of the run and every worker."""
    root = run.root
    _, done, failed, cancelled, skipped = root.counts
    logs = run.logs.values()
    rate, units_rate = rates(state, run)
    lanes = [
        LaneView(n.name, n.cap, n.in_flight, n.done, n.failed, n.consecutive, n.pruned_at)
        for n in run.lanes.values()
        if n.name
    ]
    told = run.progress_note if _stands(run) else None
    return RunView(
        spec=run.spec, state=run.state, reason=run.reason or root.progress.rest.why, root_log=root.id,
        priority=run.priority,
        submitted=root.submitted, sealed=root.sealed, cursor=root.cursor, done=done, failed=failed,
        cancelled=cancelled, skipped=skipped, in_flight=run.in_flight + run.waiting, running=run.running,
        attempts=sum(log.attempts for log in logs), retried=sum(log.retried for log in logs),
        worker_lost=sum(log.worker_lost for log in logs), stale=sum(log.stale for log in logs),
        units_in=sum(log.units_in for log in logs), units_out=sum(log.units_out for log in logs),
        created_ms=run.created_ms, updated_ms=run.updated_ms, ended_ms=run.ended_ms,
        pausing=run.phase is RunPhase.PAUSING, workers=sum(works_on(state, w, run) for w in state.workers.values()),
        survivors=run.survivors, lanes=lanes, ended_by=run.ended_by, rate=rate, units_rate=units_rate,
        invalid=root.invalid, causes=causes.of_run(state, run), waits=pending_reasons(state, run) if with_waits else [],
        note=told.note if told is not None else "", figures=told.figures if told is not None else b"",
        figures_of_each=[note.figures for note in run.endless_notes.values() if _in_flight(note) and note.figures],
        skips_rest=live(run) and root.rest is RestState.SKIPPED, busy_ms=root.progress.busy_ms,
    )  # fmt: skip


def _stands(run: Run) -> bool:
    """Return whether the last progress of an attempt is still valid; it is until a newer one, unless the attempt
    failed."""
    told = run.progress_note
    if told is None or not live(run):
        return False
    return _in_flight(told) or is_accepted(told.batch.log, told.seq)


def _in_flight(told: ProgressNote) -> bool:
    return told.batch.log.flight.get(told.seq) is told.batch


def works_on(state: State, worker: Worker, run: Run) -> bool:
    """Return whether the worker is connected and holds items of the run, or did a moment ago, as between two
    batches."""
    if not worker.session:
        return False  # dead, gone, or of an earlier leader's and not back yet: what it holds, nobody works at
    if run.id in worker.by_run:
        return True
    left_at = run.left_at.get(worker.id)
    return left_at is not None and run.state is RunState.RUNNING and state.now.mono - left_at < BETWEEN_S


def run_workers(state: State, run: Run) -> list[RunWorkerView]:
    """Return the workers that `RunView.workers` counts, the busiest first."""
    found: list[RunWorkerView] = []
    for worker in state.workers.values():
        if works_on(state, worker, run):
            begun = sum(len(batch.started) for batch in worker.batches.values() if batch.log.run is run)
            held = worker.by_run.get(run.id, 0)
            found.append(RunWorkerView(worker.id, worker.inventory.host or worker.host_id, held, begun))
    return sorted(found, key=lambda one: (-one.in_flight, one.incarnation))


def worker_detail(state: State, worker: Worker, limit: int) -> WorkerDetail:
    begun: dict[str, int] = {}
    for batch in worker.batches.values():
        begun[batch.log.run.id] = begun.get(batch.log.run.id, 0) + len(batch.started)
    views: list[WorkerRunView] = []
    for run_id, held in worker.by_run.items():
        spec = state.runs[run_id].spec
        views.append(WorkerRunView(run_id, spec.name, spec.workload, held, begun.get(run_id, 0)))
    running = (held_view(batch, seq) for batch in worker.batches.values() for seq in batch.started)
    waiting = (
        held_view(batch, seq)
        for batch in worker.batches.values()
        for seq in open_seqs(batch)
        if seq not in batch.started
    )
    used = {name: amount for name, amount in worker.used.items() if amount > 0}
    return WorkerDetail(views, list(islice(chain(running, waiting), limit)), used)


def held_view(batch: AttemptBatch, seq: int) -> HeldView:
    return HeldView(
        batch.log.run.id, place(batch.log, seq), batch.attempt, batch.worker.id, batch.started.get(seq, 0),
        batch.notes.get(seq, ""),
    )  # fmt: skip


def place(log: Log, seq: int) -> tuple[int, ...]:
    """Return the place of an item, from its run's root log down."""
    path = [seq]
    at: Log | None = log
    while at is not None and at.parent is not None:
        path.append(at.parent.seq)
        at = log.run.logs.get(at.parent.log)
    return tuple(reversed(path))


def in_flight(state: State, log_id: int, seqs: Iterable[int]) -> list[HeldView]:
    """Return those of `seqs` that a worker has."""
    log = state.logs.get(log_id)
    if log is None:
        return []
    return [held_view(batch, seq) for seq in seqs if (batch := log.flight.get(seq)) is not None]


def running(state: State, log_id: int, from_seq: int, limit: int) -> list[int]:
    """Return the first running seqs from `from_seq` on, ascending."""
    log = state.logs.get(log_id)
    if log is None:
        return []
    batches = dict.fromkeys(log.flight.values())
    return nsmallest(limit, (seq for batch in batches for seq in batch.started if seq >= from_seq))


def worker_view(state: State, worker: Worker, now: Now) -> WorkerView:
    heard_at = worker.due_at - 2 * state.settings.heartbeat_interval
    return WorkerView(
        worker.id, worker.host_id, worker.inventory, worker.state, worker.in_flight, worker.running,
        worker.registered_ms, max(0.0, now.mono - heard_at), worker.reason, worker.load, worker.done,
        causes.of_worker(worker), worker.cpu_percent, worker.memory_mib,
    )  # fmt: skip


def gauges(state: State) -> dict[str, float]:
    out: dict[str, float] = {
        "runs": len(state.runs),
        "logs": len(state.logs),
        "items_in_flight": sum(run.in_flight + run.waiting for run in state.runs.values()),
        "items_running": sum(run.running for run in state.runs.values()),
        "items_pending": sum(log.pending for log in state.logs.values() if not log.closed),
        "window_items": sum(log.window for log in state.logs.values()),
        "window_bytes": sum(log.window_bytes for log in state.logs.values()),
        "accepted_ranges": sum(len(log.accepted) for log in state.logs.values()),
    }
    for worker in state.workers.values():
        name = f"workers_{worker.state.value}"
        out[name] = out.get(name, 0) + 1
    for name, value in state.totals.items():
        out[f"items_{name}_total"] = value
    return out
