"""Runs and workers as JSON, and lists of them as tables.

The JSON of a run: `run_id, workload, name, state, reason, priority, order, sealed, submitted, committed, done, failed,
invalid, cancelled, skipped, in_flight, running, workers, attempts, retried, worker_lost, stale, units_in, units_out,
created_at, updated_at, ended_at` (RFC 3339, or null), `pausing`, `survivors` (`[{log, seq, attempt}]`), `lanes`,
`waits` (what pending items wait for: `[{reason, message, items, impossible}]`), `pending`, `per_s` and `units_per_s`
(over the last half minute), `elapsed_s`, `eta_s` (null: it cannot be said), `causes` (why workers cannot start what it
needs: `[{run_id, executor, code, message, workers, hosts, times, first_at, last_at, everywhere}]`), `note` (what is
under way says of how far it is) and `figures`, the same for programs: of a training run `step, steps, loss, lr,
grad_norm, tokens_per_s, eta_s`. `skips_rest`: what has not begun is skipped, for `reason`, and the run ends with what
runs.

`invalid` says how many of `failed` are rows that cannot be used, which the run went on without (`on_bad_row = "skip"`).
`attempts` counts those that began and have ended, `retried` those of them that came to nothing and did not end their
item, `worker_lost` those that were lost with their worker. What was given back or stolen before it began is none.

`run show` adds `on`, who works at it: `[{worker_id, host, in_flight, running}]`, and `failures`, the last ones, the
newest first: `[{row, attempt, code, message, worker, host, at, final}]` (`final`: the row failed for good).

Of a worker: `worker_id, state, host, pid, version, roles, labels, capacity, executors, plugins, in_flight, running,
done, load, cpu_percent, memory_mib, devices, last_seen_s, registered_at, reason, causes` (as of a run). `cpu_percent`
and `memory_mib` are in use on its machine; `memory_mib` is 0 where that is not known. `workers show` adds `ended_at,
host_id`, `used` (of its capacity), `runs`: `[{run_id, name, workload, in_flight, running}]`, and `held`:
`[{run_id, row, attempt, began_at}]`.

Keys are added over time, never renamed or removed. Rows count from 1; that of a child is written behind its parent's:
`43.2`.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, cast

from google.protobuf.message import Message
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from rollout.cli.streams import json_line
from rollout.cli.words import counted, first_line, when
from rollout.config.visible import styled, visible
from rollout.model.ids import short
from rollout.wire.v1 import runs_pb2 as pb
from rollout.workloads import json_form


def print_json(value: Any) -> None:
    """Print `value` as one line on standard output."""
    sys.stdout.write(json_line(value))
    sys.stdout.flush()


def fields(message: Message, keys: str) -> dict[str, Any]:
    """Return the fields of `message` that `keys` names, as in JSON. A key that ends in `at` is a time from `..._ms`."""
    return {key: convert(getattr(message, name)) for key, name, convert in _fields(keys)}


@cache
def _fields(keys: str) -> list[tuple[str, str, Callable[[Any], Any]]]:
    times = {"at": "at_ms"} | {key: f"{key[:-3]}_ms" for key in keys.split() if key.endswith("_at")}
    return [(key, times.get(key, key), timestamp if key in times else _as_json) for key in keys.split()]


def _as_json(value: Any) -> Any:
    if isinstance(value, str | int | float):
        return value
    return dict(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else list(value)


def run_json(status: pb.RunStatus) -> dict[str, Any]:
    counts = (
        "done failed invalid cancelled skipped in_flight running workers attempts retried worker_lost stale units_in "
        "units_out created_at updated_at ended_at pausing"
    )
    return {
        **fields(status.spec, "run_id workload name"),
        **fields(status, "state reason"),
        **fields(status.spec, "priority order"),
        **fields(status, "sealed submitted"),
        "committed": status.cursor,
        **fields(status, counts),
        "survivors": [
            {"log": keys.log, "seq": seq, "attempt": attempt}
            for keys in status.survivors
            for seq, attempt in zip(keys.seq, keys.attempt, strict=True)
        ],
        "lanes": [fields(lane, "name max_in_flight in_flight done failed pruned") for lane in status.lanes],
        "waits": [fields(wait, "reason message items impossible") for wait in status.waits],
        "causes": list(map(cause_json, status.causes)),
        "pending": pending(status),
        "per_s": round(status.rate, 3),
        "units_per_s": round(status.units_rate, 3),
        "elapsed_s": round(elapsed_s(status), 3),
        "eta_s": eta_s(status),
        "note": note_of(status),
        "figures": figures_of(status),
        "skips_rest": status.skips_rest,
    }


def cause_json(cause: pb.Cause) -> dict[str, Any]:
    """Return the JSON of a reason why workers cannot start what a run needs."""
    return fields(cause, "run_id executor code message workers hosts times first_at last_at everywhere")


def figures_of(status: pb.RunStatus) -> dict[str, Any]:
    """Return the attempt's progress figures for programs, or an empty mapping; for a server, sums over all replicas."""
    if not status.figures_of_each:
        return _figures(status.figures)
    sums: Counter[str] = Counter(replicas=len(status.figures_of_each))
    for one in map(_figures, status.figures_of_each):
        sums.update({name: value for name, value in one.items() if isinstance(value, int)})
    return dict(sums)


def note_of(status: pb.RunStatus) -> str:
    """Return the attempt's progress text for people."""
    if not status.figures_of_each:
        return status.note
    return ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in figures_of(status).items())


def _figures(figures: bytes) -> dict[str, Any]:
    try:
        found: Any = json.loads(figures or b"{}")
    except ValueError:
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def final(status: pb.RunStatus) -> int:
    """Return the number of items with a result of any kind."""
    return status.done + status.failed + status.cancelled + status.skipped


def failed(status: pb.RunStatus) -> int:
    """Return the number of items that failed for good, without rows that cannot be used."""
    return max(0, status.failed - status.invalid)


def pending(status: pb.RunStatus) -> int:
    """Return the number of items that no worker has."""
    return max(0, status.submitted - final(status) - status.in_flight)


def elapsed_s(status: pb.RunStatus) -> float:
    """Return the seconds since the run was opened, until it ended or now."""
    until = status.ended_ms / 1000 if status.ended_ms else time.time()
    return max(0.0, until - status.created_ms / 1000) if status.created_ms else 0.0


def eta_s(status: pb.RunStatus) -> float | None:
    """Return the seconds until nothing is left, or None if more may come or nobody works at it."""
    left = status.submitted - final(status)
    known = status.sealed and status.state == "running" and status.workers and status.rate > 0
    return round(left / status.rate, 1) if known else None


def description_json(reply: pb.RunReply) -> dict[str, Any]:
    """Return the JSON of `run show`."""
    return run_json(reply.status) | {
        "on": [{"worker_id": one.incarnation, **fields(one, "host in_flight running")} for one in reply.workers],
        "failures": [
            {"row": one.seq + 1, **fields(one, "attempt code message worker host at final")} for one in reply.failures
        ],
    }


def worker_json(worker: pb.WorkerStatus) -> dict[str, Any]:
    inventory = worker.inventory
    return {
        "worker_id": worker.incarnation,
        "state": worker.state,
        **fields(inventory, "host pid version roles labels capacity executors plugins"),
        **fields(worker, "in_flight running done load"),
        "cpu_percent": round(worker.cpu_percent, 1),
        "memory_mib": worker.memory_mib,
        "devices": list(inventory.devices),
        "last_seen_s": round(worker.last_seen_s, 3),
        **fields(worker, "registered_at reason"),
        "causes": list(map(cause_json, worker.causes)),
    }


def worker_detail_json(worker: pb.WorkerStatus) -> dict[str, Any]:
    """Return the JSON of `workers show`."""
    return worker_json(worker) | {
        **fields(worker, "ended_at host_id used"),
        "runs": [fields(run, "run_id name workload in_flight running") for run in worker.runs],
        "held": [
            {"run_id": held.run_id, "row": row_of(held.place), **fields(held, "attempt began_at")}
            for held in worker.held
        ],
    }


def row_of(place: Iterable[int]) -> str:
    """Return a row number as users write it: `43`, and `43.2` for the second child of row 43."""
    return ".".join(str(seq + 1) for seq in place)


def print_runs(runs: Sequence[pb.RunStatus], directories: Sequence[str] = ()) -> None:
    """Print a table of runs. `directories` has the output directory of each, for private runs of this machine."""
    left_out = ["invalid"] if any(status.invalid for status in runs) else []
    found = table("run", "workload", "state", "done", "failed", *left_out, "of", "workers", "started", "name")
    if directories:
        found.add_column("directory", overflow="fold")
    for status, *where in zip(runs, *([directories] if directories else []), strict=True):
        found.add_row(
            seen(status.spec.run_id),
            status.spec.workload,
            "pausing" if status.pausing else status.state,
            f"{status.done:,}",
            f"{failed(status):,}",
            *(f"{status.invalid:,}" for _ in left_out),
            f"{status.submitted:,}{'' if status.sealed else '+'}",
            str(status.workers),
            when(status.created_ms),
            visible(status.spec.name),
            *map(visible, where),
        )
    print_table(found, "no runs")


def waiting(status: pb.RunStatus) -> str:
    """Return what pending items wait for, one line each: `12 items: no worker has 4 gpus`."""
    return "\n".join(
        f"{counted(wait.items, 'item')}: {wait.message}"
        + (" (impossible with the workers that are connected)" if wait.impossible else "")
        for wait in status.waits
    )


_STARTED = {"infer": "the model", "map": "the function"}
"""Name, for users, of what an executor starts."""


_HINDERED = {
    "disk_full": "waits for room",
    "no_room": "waits for room",
    "store_unavailable": "waits for the object store",
    "model_changed": "cannot go on with it",
    "different_hardware": "cannot go on with it",
    "object_missing": "cannot go on with it",
    "object_corrupt": "cannot go on with it",
}
"""Text, by code of a cause, for what keeps a worker from continuing work that has begun."""


def cannot_start(cause: pb.Cause) -> str:
    """Return `worker 7QK3ABCD on gpu-4 cannot start the model: ...`."""
    what = _STARTED.get(cause.executor, f"executor {cause.executor!r}")
    who = f"worker {short(cause.workers[0])}" if cause.workers else "a worker"
    if cause.hosts and cause.hosts[0]:
        who += f" on {cause.hosts[0]}"
    if len(cause.workers) > 1:
        who += f" and {len(cause.workers) - 1} more"
    return f"{who} {_HINDERED.get(cause.code, f'cannot start {what}')}: {cause.message}"


def unable(causes: Sequence[pb.Cause]) -> str:
    """Return the causes for a table."""
    if not causes:
        return ""
    more = f" (and {len(causes) - 1} more)" if len(causes) > 1 else ""
    return f"cannot start {causes[0].executor}: {first_line(causes[0].message)}{more}"


def print_workers(workers: Iterable[pb.WorkerStatus], leader: str) -> None:
    found = table("worker", "state", "host", "pid", "running", "held", "done", "seen", "capacity", "reason")
    for worker in workers:
        found.add_row(
            seen(worker.incarnation),
            worker.state,
            worker.inventory.host,
            str(worker.inventory.pid or ""),
            str(worker.running),
            str(worker.in_flight),
            f"{worker.done:,}",
            f"{worker.last_seen_s:.1f} s ago",
            amounts(worker.inventory.capacity),
            visible(worker.reason) or unable(worker.causes),
        )
    print_table(found, "no workers")
    console().print(f"leader: {leader}", highlight=False, markup=False)


def seen(identifier: str) -> str:
    """Return an id for a table: short on a terminal, whole for grep and scripts."""
    return short(identifier) if sys.stdout.isatty() else identifier


def amounts(capacity: Mapping[str, float]) -> str:
    """Return amounts as `cpus 8, gpus 2, memory 24 GiB`, without those that are zero."""
    return ", ".join(_amount(name, amount) for name, amount in sorted(capacity.items()) if amount)


def _amount(name: str, amount: float) -> str:
    if name != "memory_mib":
        return f"{name} {amount:g}"
    return f"memory {amount / 1024:.{0 if amount >= 10 * 1024 else 1}f} GiB"


# ---- tables


def table(*columns: str) -> Table:
    found = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        found.add_column(column, overflow="fold", no_wrap=column in ("run", "worker"))
    return found


def print_table(found: Table, empty: str) -> None:
    console().print(found if found.row_count else empty, highlight=False)


class _Console(Console):
    """Console that prints control characters as escapes."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def console() -> Console:
    """Return a console for people. A pipe has no width and gets whole rows for grep. Brackets are printed literally."""
    width = None if sys.stdout.isatty() else 250
    return _Console(file=styled(sys.stdout), width=width, highlight=False, markup=False)


def timestamp(unix_ms: int) -> str | None:
    """Return the time as RFC 3339 for programs, or None for 0."""
    return json_form.timestamp(unix_ms) if unix_ms else None
