"""What both adapters share of the history: columns of new rows, and how far back it is kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rollout.model.errors import FencedError

from rollout_coordinator.ledger import rows
from rollout_coordinator.ledger.port import (
    EVENTS_KEPT,
    EVENTS_OF_RUN,
    OUTPUT_HEAD,
    OUTPUT_TAIL,
    EventsOf,
    NewEvent,
    NewOutput,
    OutputRow,
)

CHUNKS = 64
"""Rows of output that are read at once."""


def check_epoch(found: int | None, epoch: int) -> None:
    """FencedError."""
    if found != epoch:
        raise FencedError(f"the lease is no longer at epoch {epoch}: nothing was recorded")


def by_run(outputs: list[NewOutput]) -> dict[str, list[NewOutput]]:
    found: dict[str, list[NewOutput]] = {}
    for output in outputs:
        found.setdefault(output.run_id, []).append(output)
    return found


def output_columns(outputs: list[NewOutput], last: int) -> tuple[list[Sequence[Any]], int]:
    """Of one run, whose output has `last` bytes so far; how many it has with these."""
    positions: list[int] = []
    for output in outputs:
        last += len(output.lines)
        positions.append(last)
    run_ids, workers, lines = zip(*outputs, strict=True)
    return [run_ids, positions, [len(one) for one in lines], workers, lines], last


def cut(run_id: str, last: int) -> dict[str, Any] | None:
    """Parameters of CUT_OUTPUT; None: there is nothing to cut."""
    tail = last - OUTPUT_TAIL
    return {"run_id": run_id, "head": OUTPUT_HEAD, "tail": tail} if tail > OUTPUT_HEAD else None


def event_columns(events: list[NewEvent], last: int) -> list[Sequence[Any]]:
    at_ms, names, levels, run_ids, fields = zip(*events, strict=True)
    numbers = range(last + 1, last + 1 + len(events))
    return [list(numbers), at_ms, names, levels, run_ids, [rows.clean(one) for one in fields]]


def first_event_kept(last: int) -> int:
    """The last number that goes."""
    return last - EVENTS_KEPT


def runs_of(events: list[NewEvent]) -> list[dict[str, Any]]:
    """Parameters of CUT_EVENTS_OF_RUN."""
    return [{"run_id": run, "kept": EVENTS_OF_RUN} for run in dict.fromkeys(e.run_id for e in events) if run]


def too_much(found: Sequence[Sequence[Any]], most: int) -> list[tuple[str, int, int]]:
    """Of OUTPUT_BY_RUN, the runs whose output goes: (run, bytes, last position)."""
    total = sum(int(row[1]) for row in found)
    gone: list[tuple[str, int, int]] = []
    for run_id, size, last in found:  # ULIDs: the oldest first
        if total <= most:
            break
        if size:
            gone.append((run_id, int(size), last))
            total -= int(size)
    return gone


def events_of(of: EventsOf, after: int, limit: int) -> dict[str, Any]:
    return {"every": int(not of.run_id), "after": after, "n": limit, **of._asdict()}


def output_rows(found: Iterable[Sequence[Any]], max_bytes: int) -> list[OutputRow]:
    kept: list[OutputRow] = []
    for position, size, worker, lines in found:
        max_bytes -= len(lines)
        if kept and max_bytes < 0:
            break
        kept.append(OutputRow(position, size, worker, bytes(lines)))
    return kept
