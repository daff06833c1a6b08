"""Tables of a campaign, for the terminal and for docs/benchmarks.md."""

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
    return f"{form.format(statistics.median(values))}/{form.format(max(values))}" if values else "-"


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


def section(reports: list[dict[str, Any]]) -> list[str]:
    """Of docs/benchmarks.md: each database's campaigns taken together, objections included."""
    lines = [f"{machine()}; {datetime.now(UTC):%Y-%m-%d}. Median/maximum.", ""]
    for database in dict.fromkeys(report["database"] for report in reports):
        lines += [*_database([report for report in reports if report["database"] == database]), ""]
    return lines


SHOWN = [0, 1, 3, 4, 5, 6]
"""Columns of HEAD that are recorded."""


def _database(reports: list[dict[str, Any]]) -> list[str]:
    name = {
        "sqlite": "SQLite, one coordinator",
        "postgres": "PostgreSQL, leader and standby",
        "cloud": "PostgreSQL and S3 (emulated), leader and standby",
    }[reports[0]["database"]]
    together = {"faults": [fault for report in reports for fault in report["faults"]]}
    counted = sum(1 for fault in together["faults"] if fault["counted"])
    minutes = ", ".join(f"{report['seconds'] / 60:.0f} minutes (seed {report['seed']})" for report in reports)
    objections = [objection for report in reports for objection in report["objections"]]

    def total(key: str) -> int:
        return sum(report["totals"].get(key, 0) for report in reports)

    def line(cells: list[str]) -> str:
        return " | ".join(cells[n] for n in SHOWN)

    return [
        f"{name}: {counted} faults in {minutes}; {total('rows'):,} rows, {total('attempts'):,} attempts, "
        f"{total('epochs')} epochs, {len(objections)} objections.",
        "",
        line(HEAD),
        "|".join(["---"] * len(SHOWN)),
        *map(line, rows(together)),
        *(["", *(f"- {objection}" for objection in objections)] if objections else []),
    ]
