"""`rollout workers show` for people."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rich.text import Text

from rollout.cli.show import amounts, console, row_of, table
from rollout.cli.words import counted, duration, when
from rollout.config.visible import visible
from rollout.model.ids import short
from rollout.wire.v1 import runs_pb2 as pb


def print_worker(worker: pb.WorkerStatus) -> None:
    out = console()
    for line in _lines(worker):
        out.print(Text(visible(line)), soft_wrap=True)
    if worker.runs:
        out.print(Text("\nruns", style="bold"))
        runs = table("run", "name", "workload", "running", "held")
        for run in worker.runs:
            runs.add_row(short(run.run_id), visible(run.name), run.workload, str(run.running), str(run.in_flight))
        out.print(runs)
    if worker.held:
        cut = "" if len(worker.held) >= worker.in_flight else f", {len(worker.held)} of {worker.in_flight:,}"
        out.print(Text(f"\nrows{cut}", style="bold"))
        rows = table("run", "row", "attempt", "since")
        for held in worker.held:
            since = when(held.began_ms) or "not begun"
            rows.add_row(short(held.run_id), row_of(held.place), str(held.attempt), since)
        out.print(rows)


def _lines(worker: pb.WorkerStatus) -> Iterator[str]:
    inventory = worker.inventory
    on = f" on {inventory.host}" if inventory.host else ""
    on += f" (pid {inventory.pid})" if inventory.pid else ""
    reason = f" ({worker.reason})" if worker.reason else ""
    yield f"worker {worker.incarnation}{on}: {worker.state}{reason}"
    since = f"  there since {when(worker.registered_ms)}"
    if worker.ended_ms:
        yield f"{since}, ended {when(worker.ended_ms)}"
    else:
        up = duration(max(0.0, time.time() - worker.registered_ms / 1000))
        yield f"{since} ({up}), last heard of {worker.last_seen_s:.1f} s ago"
        yield f"  {worker.running:,} running, {worker.in_flight:,} held, {counted(worker.done, 'row')} done"
    facts = {
        "capacity": amounts(inventory.capacity),
        "in use": amounts(worker.used),
        "executors": ", ".join(inventory.executors),
        "plugins": ", ".join(inventory.plugins),
        "roles": ", ".join(inventory.roles),
        "labels": ", ".join(f"{key}={value}" for key, value in sorted(inventory.labels.items())),
        "version": inventory.version,
    }
    for cause in worker.causes:
        yield f"  cannot start {cause.executor} for run {short(cause.run_id)}: {cause.message}"
    for name, value in facts.items():
        if value:
            yield f"  {name}: {value}"
