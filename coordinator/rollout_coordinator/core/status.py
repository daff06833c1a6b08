"""What the core tells of itself: views for people and gauges for metrics."""

from __future__ import annotations

from rollout_coordinator.core.events import Now
from rollout_coordinator.core.state import Run, State, Worker
from rollout_coordinator.core.views import LaneView, RunView, WorkerView
from rollout_coordinator.core.waits import waits


def run_view(state: State, run: Run, *, with_waits: bool = False) -> RunView:
    """`with_waits`: looks at every queue of the run and at every worker."""
    root = run.root
    _, done, failed, cancelled, skipped = root.counts
    logs = run.logs.values()
    lanes = [
        LaneView(n.name, n.cap, n.in_flight, n.done, n.failed, n.consecutive, n.pruned_at)
        for n in run.lanes.values()
        if n.name
    ]
    return RunView(
        spec=run.spec, state=run.state, reason=run.reason, root_log=root.id, priority=run.priority,
        submitted=root.submitted, sealed=root.sealed, cursor=root.cursor, done=done, failed=failed,
        cancelled=cancelled, skipped=skipped, in_flight=run.in_flight + run.waiting, running=run.running,
        attempts=sum(log.attempts for log in logs), retried=sum(log.retried for log in logs),
        worker_lost=sum(log.worker_lost for log in logs), stale=sum(log.stale for log in logs),
        units_in=sum(log.units_in for log in logs), units_out=sum(log.units_out for log in logs),
        created_ms=run.created_ms, updated_ms=run.updated_ms, ended_ms=run.ended_ms,
        pausing=bool(run.pausing_until_ms), workers=sum(run.id in w.by_run for w in state.workers.values()),
        survivors=run.survivors, lanes=lanes, waits=waits(state, run) if with_waits else [],
    )  # fmt: skip


def worker_view(state: State, worker: Worker, now: Now) -> WorkerView:
    heard_at = worker.due_at - 2 * state.settings.heartbeat_interval
    return WorkerView(
        worker.id, worker.host_id, worker.inventory, worker.state, worker.in_flight, worker.running,
        worker.registered_ms, max(0.0, now.mono - heard_at), worker.reason, worker.load, worker.done,
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
