"""Tables of a campaign, for the terminal and for docs/chaos.md."""

from __future__ import annotations

import os
import platform
import sqlite3
import statistics
import subprocess
from datetime import UTC, datetime
from typing import Any

import psutil
from postgres import find_binary

PER_KIND = 20


def unix(timestamp: str) -> float:
    """Of an RFC 3339 time in UTC."""
    return datetime.fromisoformat(timestamp).timestamp()


def rows(report: dict[str, Any]) -> list[list[str]]:
    """Per kind: faults that count, with others, rows in flight, and times over those that did not overlap."""
    found: list[list[str]] = []
    for kind in dict.fromkeys(sorted(fault["kind"] for fault in report["faults"])):
        mine = [f for f in report["faults"] if f["kind"] == kind and f["counted"]]
        alone = [f for f in mine if not f["overlaps"]] or mine
        found.append(
            [
                kind,
                str(len(mine)),
                str(sum(1 for f in mine if f["overlaps"])),
                spread([f["in_flight"] for f in mine], "{:.0f}"),
                spread([f["held_s"] for f in alone]),
                spread([f["first_commit_s"] for f in alone]),
                spread([f["settled_s"] for f in alone]),
            ]
        )
    return found


HEAD = ["kind", "faults", "overlapping", "in flight", "held, s", "first commit, s", "settled, s"]


def spread(values: list[float], form: str = "{:.1f}") -> str:
    """Median and maximum."""
    return f"{form.format(statistics.median(values))} / {form.format(max(values))}" if values else "-"


def table(report: dict[str, Any]) -> str:
    lines = [HEAD, *rows(report)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(HEAD))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    counted = sum(1 for f in report["faults"] if f["counted"])
    totals = ", ".join(f"{key} {value}" for key, value in report["totals"].items())
    text.append(
        f"{report['database']}: {counted} faults count, {report['seconds']:.0f} s, seed {report['seed']}; {totals}"
    )
    text.append(f"{len(report['objections'])} objections")
    return "\n".join(text)


def postgres_version() -> str:
    binary = find_binary("postgres")
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout if binary else ""
    return said.split()[2] if said else "none"


def machine() -> str:
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}, Python {platform.python_version()}, "
        f"SQLite {sqlite3.sqlite_version}, PostgreSQL {postgres_version()}"
    )


def page(reports: list[dict[str, Any]]) -> str:
    """docs/chaos.md."""
    text = [
        "# Fault campaign",
        "",
        'Written by `make chaos CHAOS_ARGS="--record"` (or with `--reports`, from campaigns kept by `--dir`). Real processes over mTLS: a coordinator (on PostgreSQL also a standby), three workers, two clients that run one',
        "`rollout infer batch` after another on the mock engine. Faults strike one after another, now and then two at once, each while rows are in flight at what it strikes. Afterwards an",
        "independent checker (`tests/chaos/checker/`) reads the ledger, an audit that database triggers kept of every change, and the output files: every row once and in order, every result of a",
        "current attempt and of the current leader, cursors that only moved forward and only over results, completed only when the ledger says so, every `worker_failed` explained by a fault, no process left. What it finds is an objection.",
        "",
        f"Machine: {machine()}; {datetime.now(UTC):%Y-%m-%d}; load average {os.getloadavg()[2]:.0f} when this was written (other work on the machine makes a process take longer to start, and so all that waits for one). All deadlines at their defaults (TTL 5 s).",
        "",
        "Columns: faults that count (work in flight, effect proved); of these, those that overlapped another; rows in flight at what was struck; how long the fault lasted until it was healed; from the",
        "strike to the first row committed anywhere; from the strike until every row that was in flight there had its result. Median / maximum; times of overlapping faults are left out.",
        "A row takes 0.4 to 0.8 s by itself; other workers go on committing while one is struck. A run of `exclusive` rows of 15 seconds goes on beside the batches: each attempt holds a lock that the kernel frees when its process",
        "has ended, and one that finds it taken is an objection, but while a whole worker stands still (SIGSTOP to all its processes, half of `worker stopped`; the other half stops the daemon only).",
        "",
    ]
    for database in dict.fromkeys(report["database"] for report in reports):
        text += _section([report for report in reports if report["database"] == database])
    return "\n".join(text)


def _section(reports: list[dict[str, Any]]) -> list[str]:
    """One database: its campaigns taken together."""
    name = {"sqlite": "SQLite, one coordinator", "postgres": "PostgreSQL, leader and standby"}[reports[0]["database"]]
    together = {"faults": [fault for report in reports for fault in report["faults"]]}
    counted = sum(1 for fault in together["faults"] if fault["counted"])
    minutes = ", ".join(f"{report['seconds'] / 60:.0f} minutes with seed {report['seed']}" for report in reports)
    objections = [objection for report in reports for objection in report["objections"]]
    said = ["Objections:", "", *(f"- {o}" for o in objections)] if objections else ["Objections: none."]

    def total(key: str) -> int:
        return sum(report["totals"].get(key, 0) for report in reports)

    return [
        f"## {name}",
        "",
        f"{counted} faults; {minutes}.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|" + "---|" * len(HEAD),
        *("| " + " | ".join(line) + " |" for line in rows(together)),
        "",
        f"{total('rows'):,} rows in {total('batches')} batches ({total('commands')} commands), {total('attempts'):,} attempts, {total('transactions'):,} transactions under {total('epochs')} epochs; "
        f"`worker_failed` {total('worker_failed')} times, `coordinator_fenced` {total('coordinator_fenced')} times; "
        f"exclusive rows: {total('exclusive_attempts')} attempts, {total('exclusive_killed')} of them killed, {total('exclusive_beside_frozen')} tries beside one of a worker that stood still; "
        f"longest time without a commit {max(report['totals'].get('longest_pause_s', 0.0) for report in reports):.0f} s; the ledger was looked at {total('looks'):,} times while it changed.",
        "",
        *said,
        "",
    ]
