"""A timeline of a run in Chrome's trace event format, which chrome://tracing and Perfetto show.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: a process for each worker, a thread for
each of its slots, a complete event ("X") for each try.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rollout.workloads.test.cases import GOOD, CaseResult, Try

_COLOURS = {True: "good", False: "terrible"}
"""`cname` of tests that passed, and of those that did not."""


def chrome_trace(results: Iterable[CaseResult]) -> bytes:
    """Return `trace.json`. Times are microseconds since the first try began."""
    ran = [(one, result, number) for result in results for number, one in enumerate(result.tries, 1) if one.started]
    ran.sort(key=lambda entry: (entry[0].started, entry[1].group, entry[1].id))
    slots = _slots([one for one, _, _ in ran])
    workers = {worker: number for number, worker in enumerate(sorted({one.worker for one, _, _ in ran}), 1)}
    began = ran[0][0].started if ran else 0.0
    events = [
        *(_name("process_name", number, 0, worker or "worker") for worker, number in workers.items()),
        *(
            _name("thread_name", workers[worker], slot, f"slot {slot}")
            for worker, slot in sorted({(worker, slot) for (worker, _), slot in slots.items()})
        ),
    ]
    for one, result, number in ran:
        events.append(
            {
                "name": result.id,
                "cat": one.outcome.value,
                "ph": "X",
                "ts": round((one.started - began) * 1e6),
                "dur": round(one.seconds * 1e6),
                "pid": workers[one.worker],
                "tid": slots[one.worker, one.process],
                "cname": _COLOURS[one.outcome in GOOD],
                "args": {"group": result.group, "try": number, "outcome": one.outcome.value, "message": one.message},
            }
        )
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}).encode()


def _slots(tries: Iterable[Try]) -> dict[tuple[str, str], int]:
    """Assign rows, from 1, to a worker's processes: one that began after another ended takes its row."""
    spans: dict[tuple[str, str], tuple[float, float]] = {}
    for one in tries:
        first, last = spans.get((one.worker, one.process), (one.started, 0.0))
        spans[one.worker, one.process] = min(first, one.started), max(last, one.started + one.seconds)
    ends: dict[str, list[float]] = {}
    slots: dict[tuple[str, str], int] = {}
    for key, (first, last) in sorted(spans.items(), key=lambda item: (item[1], item[0])):
        rows = ends.setdefault(key[0], [])
        free = next((row for row, end in enumerate(rows) if end <= first), len(rows))
        rows[free : free + 1] = [last]
        slots[key] = free + 1
    return slots


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
