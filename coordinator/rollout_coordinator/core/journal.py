"""Rows that changed in a step, written once each at its end."""

from __future__ import annotations

from rollout_coordinator.core.state import Run, State, Worker
from rollout_coordinator.core.step import RunRow, WorkerRow


def write_rows(state: State) -> None:
    """The rows of logs, runs and lanes that were noted, unless they were forgotten in the same step."""
    writes, effects = state.step.writes, state.effects
    for log in effects.logs.values():
        if log.id in state.logs:
            writes.logs[log.id] = log.row()
    for run in effects.runs.values():
        if run.id in state.runs:
            writes.runs[run.id] = run_row(run)
    for key, lane in effects.lanes.items():
        if key[0] in state.runs:
            writes.lanes[key] = lane.row(key[0])


def run_row(run: Run) -> RunRow:
    return RunRow(
        run.spec, run.state, run.reason, run.root.id, run.created_ms, run.updated_ms, run.ended_ms,
        run.stop_submitting, run.pausing_until_ms, run.survivors, run.priority,
        run.ended_by,
    )  # fmt: skip


def write_worker(state: State, worker: Worker) -> None:
    state.step.writes.workers[worker.id] = WorkerRow(
        worker.id, worker.host_id, worker.inventory, worker.state, worker.registered_ms, worker.ended_ms, worker.reason
    )
