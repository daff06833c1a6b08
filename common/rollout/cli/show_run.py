"""`rollout run show` for people: progress, workers, what the run waits for, and its last failures."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from rollout.cli.show import cannot_start, console, elapsed_s, eta_s, failed, final, note_of, pending, table, waiting
from rollout.cli.words import counted, duration, first_line, of_unit, rate, unsuccessful, were, when
from rollout.config.visible import visible
from rollout.model.ids import short
from rollout.wire.v1 import runs_pb2 as pb
from rollout.workloads.registered import unit_of

INDENT = "  "


def print_run(status: pb.RunStatus) -> None:
    """Print a run's status and what it waits for."""
    out = console()
    for line in _lines(status):
        out.print(Text(visible(line)), soft_wrap=True)


def print_description(reply: pb.RunReply) -> None:
    """Print the answer of `run show`: the status, its workers and its last failures."""
    print_run(reply.status)
    out = console()
    if reply.workers:
        _section("workers")
        out.print(_workers(reply.workers))
    if reply.failures:
        _section("last failures, the newest first")
        out.print(_failures(reply.failures))
        if reply.status.failed:
            out.print(Text(f"{INDENT}all of them: rollout run items {short(reply.status.spec.run_id)} --failed"))


def in_a_line(status: pb.RunStatus) -> str:
    """Return the line of `run watch`: progress, rate, time left."""
    unit, measure = unit_of(status.spec.workload)
    state = "pausing" if status.pausing else status.state
    of = f"{status.submitted:,}{'' if status.sealed else '+'}"
    line = f"{state}: {status.done:,} done, {unsuccessful(status.failed, status.invalid)} of {of}"
    moving = _moving(status, unit, measure)
    if state == "running" and (note := note_of(status)):
        return f"{line}, {note}"
    return f"{line}, {status.running:,} running, {moving}" if moving and state == "running" else line


def _section(title: str) -> None:
    out = console()
    out.print()
    out.print(Text(title, style="bold"))


def _lines(status: pb.RunStatus) -> Iterable[str]:
    spec = status.spec
    unit, measure = unit_of(spec.workload)
    named = f" {spec.name}" if spec.name else ""
    state = "pausing" if status.pausing else status.state
    reason, *where = status.reason.splitlines() or [""]
    yield f"run {spec.run_id}{named}: {spec.workload}, {state}" + (f" ({reason})" if reason else "")
    yield from (INDENT * 2 + line for line in where if not status.causes)  # which say it too
    yield INDENT + _progress(status, unit)
    if moving := _moving(status, unit, measure):
        yield INDENT + moving
    if note := note_of(status):
        yield INDENT + note
    if status.attempts:
        yield INDENT + _attempts(status)
    times = [f"started {when(status.created_ms)}"] if status.created_ms else []
    if status.ended_ms:
        times.append(f"ended {when(status.ended_ms)}, after {duration(elapsed_s(status))}")
    elif times and status.state != "interrupted":
        times.append(f"running for {duration(elapsed_s(status))}")
    if times:
        yield INDENT + ", ".join(times)
    if spec.priority:
        yield f"{INDENT}priority {spec.priority}"
    for lane in status.lanes:
        cap = f" of at most {lane.max_in_flight}" if lane.max_in_flight else ""
        pruned = ", pruned" if lane.pruned else ""
        counts = f"{lane.in_flight} in flight{cap}, {lane.done} done, {lane.failed} failed"
        yield f"{INDENT}lane {lane.name}: {counts}{pruned}"
    if status.survivors:
        count = sum(len(keys.seq) for keys in status.survivors)
        yield f"{INDENT}{counted(count, 'attempt')} did not stop and may still run"
    if status.causes:
        yield "cannot start, or go on"
        for cause in status.causes:
            tries = f" ({counted(cause.times, 'try').replace('trys', 'tries')}, last at {when(cause.last_ms)})"
            first, *rest = cannot_start(cause).splitlines()
            yield INDENT + first + tries
            yield from (INDENT * 2 + line for line in rest)
    if status.waits:
        yield "waits"
        for line in waiting(status).splitlines():
            yield INDENT + line


def _progress(status: pb.RunStatus, unit: str) -> str:
    more = "" if status.sealed else ", more are being submitted"
    counts = {
        "done": status.done,
        "failed": failed(status),
        "left out as invalid": status.invalid,
        "cancelled": status.cancelled,
        "skipped": status.skipped,
        "running": status.running,
        "with workers, not begun": max(0, status.in_flight - status.running),
        "pending": pending(status),
    }
    parts = [f"{number:,} {what}" for what, number in counts.items() if number]
    if status.figures_of_each:
        return f"{of_unit(status.submitted, unit)}: {', '.join(parts)}"
    return f"{final(status):,} of {of_unit(status.submitted, unit)}{more}" + (f": {', '.join(parts)}" if parts else "")


def _moving(status: pb.RunStatus, unit: str, measure: str) -> str:
    """Return rate, time left and workers of a running run."""
    if status.state not in ("running", "paused", "interrupted"):
        return ""
    workers = counted(status.workers, "worker") if status.workers else "no workers"
    if status.state != "running":
        return f"nothing new is started; {status.running} still running on {workers}" if status.running else ""
    if status.figures_of_each:  # items that go on until the run ends: no rate of them
        return f"on {workers}"
    parts = [f"{rate(status.rate)} {unit}/s"]
    if measure and status.units_rate:
        parts.append(f"{rate(status.units_rate)} {measure}/s")
    parts.append(workers)
    eta = eta_s(status)
    if eta is not None and status.submitted > final(status):
        parts.append(f"about {duration(eta)} left")
    return ", ".join(parts)


def _attempts(status: pb.RunStatus) -> str:
    line = f"{counted(status.attempts, 'attempt')} ended"
    if status.retried:
        line += f", {status.retried:,} came to nothing"
        if status.state not in ("killed", "failed"):  # where what was cut off by the end is among them
            line += f" and {were(status.retried)} repeated"
    if status.worker_lost:
        line += f", {status.worker_lost:,} {were(status.worker_lost)} lost with the worker"
    return line


def _workers(workers: Iterable[pb.RunWorker]) -> Table:
    found = table("worker", "host", "running", "held")
    for one in workers:
        found.add_row(short(one.incarnation), one.host, str(one.running), str(one.in_flight))
    return found


def _failures(failures: Iterable[pb.RunFailure]) -> Table:
    found = table("row", "when", "code", "worker", "host", "then", "cause")
    for one in failures:
        then = "failed for good" if one.final else "tried again"
        cause = Text(first_line(one.message))
        found.add_row(str(one.seq + 1), when(one.at_ms), one.code, short(one.worker), one.host, then, cause)
    return found
