"""Rows that changed in a step, written once each at its end."""

from __future__ import annotations

import json

from rollout_coordinator.core import runs
from rollout_coordinator.core.state import Log, State


def extra_of(log: Log) -> str:
    kept = {key: value for key, value in log.extra.items() if key != "replayed" and value}
    return json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=False) if kept else "{}"


def write_dirty(c: State) -> None:
    writes = c.step.writes
    for log in c.dirty_logs.values():
        if log.id in c.logs:
            writes.logs[log.id] = log.row(extra_of(log))
    c.dirty_logs.clear()
    for run in c.dirty_runs.values():
        if run.id not in c.runs:
            continue
        if run.pausing_until_ms and not run.in_flight and not run.waiting:
            run.pausing_until_ms = 0  # every attempt has answered
        writes.runs[run.id] = runs.row(run)
    c.dirty_runs.clear()
    for key, row in c.dirty_lanes.items():
        if key[0] in c.runs:
            writes.lanes[key] = row
    c.dirty_lanes.clear()
