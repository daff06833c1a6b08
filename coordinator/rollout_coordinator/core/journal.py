"""Rows that changed in a step, written once each at its end."""

from __future__ import annotations

import json

from rollout_coordinator.core import runs
from rollout_coordinator.core.state import Log, State


def extra_json(log: Log) -> str:
    kept = {key: value for key, value in log.extra.items() if key != "replayed" and value}
    return json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=False) if kept else "{}"


def write_dirty(state: State) -> None:
    writes = state.step.writes
    for log in state.dirty_logs.values():
        if log.id in state.logs:
            writes.logs[log.id] = log.row(extra_json(log))
    state.dirty_logs.clear()
    for run in state.dirty_runs.values():
        if run.id not in state.runs:
            continue
        if run.pausing_until_ms and not run.in_flight and not run.waiting:
            run.pausing_until_ms = 0  # every attempt has answered
        writes.runs[run.id] = runs.row(run)
    state.dirty_runs.clear()
    for key, row in state.dirty_lanes.items():
        if key[0] in state.runs:
            writes.lanes[key] = row
    state.dirty_lanes.clear()
