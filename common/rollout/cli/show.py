"""Runs and workers as JSON and as tables.

The JSON of a run: `run_id, workload, name, state, reason, priority, order, sealed, submitted, committed, done, failed,
cancelled, skipped, in_flight, running, workers, attempts, retried, worker_lost, stale, units_in, units_out, created_at,
updated_at, ended_at` (RFC 3339, or null), `pausing`, `survivors` (`[{log, seq, attempt}]`), `lanes`, `waits`
(what pending items wait for: `[{reason, message, items, impossible}]`). Of a worker:
`worker_id, state, host, version, roles, labels, capacity, executors, plugins, in_flight, running, done, load,
last_seen_s, registered_at, reason`. Keys are added over time, never renamed or removed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from rollout.cli.streams import json_line
from rollout.wire.v1 import runs_pb2 as pb


def print_json(value: Any) -> None:
    """One line on standard output."""
    sys.stdout.write(json_line(value))
    sys.stdout.flush()


def run_json(status: pb.RunStatus) -> dict[str, Any]:
    spec = status.spec
    return {
        "run_id": spec.run_id,
        "workload": spec.workload,
        "name": spec.name,
        "state": status.state,
        "reason": status.reason,
        "priority": spec.priority,
        "order": spec.order,
        "sealed": status.sealed,
        "submitted": status.submitted,
        "committed": status.cursor,
        "done": status.done,
        "failed": status.failed,
        "cancelled": status.cancelled,
        "skipped": status.skipped,
        "in_flight": status.in_flight,
        "running": status.running,
        "workers": status.workers,
        "attempts": status.attempts,
        "retried": status.retried,
        "worker_lost": status.worker_lost,
        "stale": status.stale,
        "units_in": status.units_in,
        "units_out": status.units_out,
        "created_at": _time(status.created_ms),
        "updated_at": _time(status.updated_ms),
        "ended_at": _time(status.ended_ms),
        "pausing": status.pausing,
        "survivors": [
            {"log": keys.log, "seq": seq, "attempt": attempt}
            for keys in status.survivors
            for seq, attempt in zip(keys.seq, keys.attempt, strict=True)
        ],
        "lanes": [
            {
                "name": lane.name,
                "max_in_flight": lane.max_in_flight,
                "in_flight": lane.in_flight,
                "done": lane.done,
                "failed": lane.failed,
                "pruned": lane.pruned,
            }
            for lane in status.lanes
        ],
        "waits": [
            {"reason": wait.reason, "message": wait.message, "items": wait.items, "impossible": wait.impossible}
            for wait in status.waits
        ],
    }


def worker_json(worker: pb.WorkerStatus) -> dict[str, Any]:
    inventory = worker.inventory
    return {
        "worker_id": worker.incarnation,
        "state": worker.state,
        "host": inventory.host,
        "version": inventory.version,
        "roles": list(inventory.roles),
        "labels": dict(inventory.labels),
        "capacity": dict(inventory.capacity),
        "executors": list(inventory.executors),
        "plugins": list(inventory.plugins),
        "in_flight": worker.in_flight,
        "running": worker.running,
        "done": worker.done,
        "load": worker.load,
        "last_seen_s": round(worker.last_seen_s, 3),
        "registered_at": _time(worker.registered_ms),
        "reason": worker.reason,
    }


def print_runs(runs: Iterable[pb.RunStatus]) -> None:
    table = _table("run", "workload", "state", "done", "failed", "of", "workers", "started", "name")
    for status in runs:
        table.add_row(
            status.spec.run_id,
            status.spec.workload,
            status.state,
            str(status.done),
            str(status.failed),
            f"{status.submitted}{'' if status.sealed else '+'}",
            str(status.workers),
            _time(status.created_ms) or "",
            status.spec.name,
        )
    _print(table, "no runs")


def print_run(status: pb.RunStatus) -> None:
    lines = run_json(status) | {"waits": waiting(status)}
    table = Table.grid(padding=(0, 2))
    for key, value in lines.items():
        if value in (None, "", [], 0, False) and key not in ("submitted", "committed", "done", "failed"):
            continue
        table.add_row(key, _text(value))
    _console().print(table)


def waiting(status: pb.RunStatus) -> str:
    """What its pending items wait for, a line each: `12 items: no worker has 4 gpus`."""
    return "\n".join(
        f"{wait.items} items: {wait.message}"
        + (" (impossible with the workers that are connected)" if wait.impossible else "")
        for wait in status.waits
    )


def print_workers(workers: Iterable[pb.WorkerStatus], leader: str) -> None:
    table = _table("worker", "state", "host", "running", "held", "done", "seen", "capacity", "reason")
    for worker in workers:
        capacity = ", ".join(f"{name} {amount:g}" for name, amount in sorted(worker.inventory.capacity.items()))
        table.add_row(
            worker.incarnation,
            worker.state,
            worker.inventory.host,
            str(worker.running),
            str(worker.in_flight),
            str(worker.done),
            f"{worker.last_seen_s:.1f} s ago",
            capacity,
            worker.reason,
        )
    _print(table, "no workers")
    _console().print(f"leader: {leader}", highlight=False, markup=False)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in ("run", "worker"))
    return table


def _print(table: Table, empty: str) -> None:
    _console().print(table if table.row_count else empty, highlight=False)


def _console() -> Console:
    # A pipe has no width: the whole of every row, for grep.
    return Console(width=None if sys.stdout.isatty() else 250)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _time(unix_ms: int) -> str | None:
    if not unix_ms:
        return None
    return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
