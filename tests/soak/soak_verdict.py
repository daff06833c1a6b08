"""Is a series flat? Compares the first with the last quarter after warm-up; no clock, no process, only numbers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from rollout_coordinator.core.settings import CoreSettings
from soak_sampling import Series

WARM_UP = 0.10  # of the time, and at least
WARM_UP_S = 660.0  # ten times orphan_grace: so long the coordinator remembers workers that went, so they add up before
ALLOWED = 0.20  # growth of the median from the first to the last quarter
LONG_LIVED = 0.80  # a process seen in this share of the samples after warm-up is judged
FLOORS = {
    # An interpreter takes memory from the system in 1 MiB arenas, glibc in one heap per thread: half a dozen of them
    # more or less say nothing.
    "rss": 6.0,
    "children rss": 120.0,  # two processes more: slots and engines come and go with the work
    "children": 2.0,
    "descriptors": 6.0,  # streams and connections of the moment
    "threads": 4.0,
    "tasks": 12.0,  # one worker more or less is up to a dozen
    "runs kept too long": 3.0,
    "workers in memory": 12.0,
    "logs in memory": 20.0,
    "accepted_ranges in memory": 60.0,
}
"""Growth below this is no finding, in the series' unit."""
REPORTED_ONLY = frozenset({"database", "wal", "runs in memory"})
"""Shown and not judged: a ledger grows with its rows, and the runs of the last minute are as many as the machine does in a minute."""
KEEP_ENDED_S = CoreSettings().keep_ended  # for so long the coordinator keeps a run that ended


@dataclass(frozen=True)
class Life:
    """A run's, in the seconds of the series; `inf` for what did not happen."""

    submitted: float
    ended: float = inf
    deleted: float = inf

    def due_in_memory(self, at: float) -> bool:
        return self.submitted <= at < min(self.ended + KEEP_ENDED_S, self.deleted)


def kept_too_long(held: Series, lives: Iterable[Life]) -> Series:
    """Of the runs in memory those that have no business there: not open, and not ended within the last minute."""
    known = list(lives)
    points = [(at, value - sum(life.due_in_memory(at) for life in known)) for at, value in held.points]
    return Series(held.who, "runs kept too long", held.unit, points)


@dataclass(frozen=True)
class Judged:
    who: str
    what: str
    unit: str
    first: float  # median of the first quarter after warm-up
    last: float  # median of the last quarter
    highest: float
    slope_h: float  # of the least-squares line after warm-up, per hour
    judged: bool
    flat: bool


def warm_up(seconds: float) -> float:
    """Of a soak of that length; a short one, which nobody judges, has only its tenth."""
    return max(WARM_UP * seconds, WARM_UP_S if seconds >= 1.5 * WARM_UP_S else 0.0)


def judge(series: Iterable[Series], seconds: float) -> list[Judged]:
    """Every series that lasted: the longest is that of a process that lived all the time."""
    begin = warm_up(seconds)
    warm = {one: [(at, value) for at, value in one.points if at >= begin] for one in series}
    longest = max((len(points) for points in warm.values()), default=0)
    found: list[Judged] = []
    for one, points in warm.items():
        if len(points) < 8 or len(points) < LONG_LIVED * longest:
            continue
        quarter = len(points) // 4
        first = statistics.median(value for _, value in points[:quarter])
        last = statistics.median(value for _, value in points[-quarter:])
        growth = last - first
        slope = statistics.linear_regression(*zip(*points, strict=True)).slope * 3600
        found.append(
            Judged(
                one.who,
                one.what,
                one.unit,
                first,
                last,
                max(value for _, value in points),
                slope,
                one.what not in REPORTED_ONLY,
                one.what in REPORTED_ONLY or growth <= ALLOWED * first or growth <= FLOORS[one.what],
            )
        )
    return found


def table(judged: Iterable[Judged]) -> str:
    """A Markdown table, one line a series; of children only their memory, and what was not flat."""
    lines = [
        "| process | what | first quarter | last quarter | highest | slope an hour | flat |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for one in judged:
        if " child " in one.who and one.what != "rss" and one.flat:
            continue
        unit = f" {one.unit}" if one.unit else ""
        verdict = "yes" if one.flat else "NO"
        lines.append(
            f"| {one.who} | {one.what} | {one.first:.1f}{unit} | {one.last:.1f}{unit} | {one.highest:.1f}{unit} | "
            f"{one.slope_h:+.1f}{unit} | {verdict if one.judged else '(not judged)'} |"
        )
    return "\n".join(lines)


def summary(judged: Iterable[Judged]) -> str:
    """A Markdown table, one line a process: medians of the first and the last quarter. Children are left out if flat."""
    shown = [one for one in judged if not (one.flat and "child" in f"{one.who} {one.what}")]
    kinds = ("rss", "descriptors", "threads", "tasks")
    lines = ["process | memory | descriptors | threads | tasks", "---|---|---|---|---"]
    for who in dict.fromkeys(one.who for one in shown if one.what in kinds):
        mine = {one.what: one for one in shown if one.who == who}
        lines.append(" | ".join([who, *(_change(mine.get(kind)) for kind in kinds)]))
    others = [f"{one.who} {one.what}: {_change(one)}" for one in shown if one.what not in kinds]
    return "\n".join([*lines, "", "; ".join(others) + "."])


def _change(one: Judged | None) -> str:
    if one is None:
        return ""
    unit = f" {one.unit}" if one.unit else ""
    return f"{one.first:.0f}..{one.last:.0f}{unit}" + ("" if one.flat else " (GREW)")
