"""The ledger as it stands in the end: every row once, numbered without gaps, of an attempt that did not end otherwise."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from chaos.ledger_reader import Reader, Row, unpack_keys

DONE, FAILED = 1, 2
SHOWN = 5
"""Objections of one kind that are spelled out; the rest is counted."""


@dataclass
class Ledger:
    """Every row that the judgement needs, as read by plain SQL."""

    lease: list[Row]  # epoch, batch
    runs: list[Row]  # run_id, root_log, state, item_order
    logs: list[Row]  # log, submitted, sealed, cursor, done, failed, cancelled, skipped
    items: list[Row]  # log, seq, id
    results: list[Row]  # log, seq, attempt, outcome, code, worker, accepted_ms, position, data
    attempts: list[Row]  # log, seq, attempt, ending
    assignments: list[Row]  # keys
    seen_results: list[Row]  # n, log, seq, attempt, worker, epoch, batch, port
    seen_assignments: list[Row]  # n, worker, keys, epoch, batch, port
    seen_cursors: list[Row]  # n, log, before, after, epoch, batch, port
    seen_leases: list[Row]  # n, before, after, batch_before, batch_after, address, port
    tampered: list[Row]  # n, what, log, seq, port


QUERIES = {
    "lease": "SELECT epoch, batch FROM lease",
    "runs": "SELECT run_id, root_log, state, item_order FROM run",
    "logs": "SELECT log, submitted, sealed, cursor, done, failed, cancelled, skipped FROM log",
    "items": "SELECT log, seq, id FROM item",
    "results": "SELECT log, seq, attempt, outcome, code, worker, accepted_ms, position, data FROM result",
    "attempts": "SELECT log, seq, attempt, ending FROM attempt",
    "assignments": "SELECT keys FROM assignment",
    "seen_results": "SELECT n, log, seq, attempt, worker, epoch, batch, port FROM chaos_result ORDER BY n",
    "seen_assignments": "SELECT n, worker, keys, epoch, batch, port FROM chaos_assignment ORDER BY n",
    "seen_cursors": "SELECT n, log, before, after, epoch, batch, port FROM chaos_cursor ORDER BY n",
    "seen_leases": "SELECT n, before, after, batch_before, batch_after, address, port FROM chaos_lease ORDER BY n",
    "tampered": "SELECT n, what, log, seq, port FROM chaos_tamper ORDER BY n",
}


async def load(reader: Reader) -> Ledger:
    """One snapshot of everything. AwayError."""
    found = await reader.rows(*QUERIES.values())
    return Ledger(**dict(zip(QUERIES, found, strict=True)))


def brief(objections: Iterable[str], what: str) -> Iterator[str]:
    """The first few, and how many more."""
    found = list(objections)
    yield from found[:SHOWN]
    if len(found) > SHOWN:
        yield f"... and {len(found) - SHOWN} more: {what}"


def check_ledger(ledger: Ledger) -> list[str]:
    found = [f"run {run} is {state}" for run, _, state, _ in ledger.runs if state != "completed"]
    items: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
    for log, seq, item in ledger.items:
        items[log].append((seq, bytes(item)))
    results: dict[int, list[Row]] = defaultdict(list)
    for row in ledger.results:
        results[row[0]].append(row)
    for row in ledger.logs:
        found += _check_log(row, items[row[0]], results[row[0]])
    strays = set(results) - {row[0] for row in ledger.logs}
    found += [f"results of log {log}, which does not exist" for log in strays]
    found += brief(_check_attempts(ledger), "attempts")
    found += brief((f"{what}: log {log} seq {seq}" for _, what, log, seq, _ in ledger.tampered), "tampering")
    return found


def _check_log(row: Row, items: list[tuple[int, bytes]], results: list[Row]) -> Iterator[str]:
    log, submitted, sealed, cursor, done, failed, cancelled, skipped = row
    if not sealed:
        yield f"log {log} is not sealed"
    if not submitted == cursor == len(items):
        yield f"log {log}: {submitted} submitted, {cursor} committed, {len(items)} items"
    if sorted(seq for seq, _ in items) != list(range(len(items))):
        yield f"log {log}: the items are not numbered 0 to {len(items) - 1}"
    if len({item for _, item in items}) != len(items):
        yield f"log {log}: two items have one id"
    times = Counter(result[1] for result in results)
    yield from brief((f"log {log} seq {seq} has {n} results" for seq, n in times.items() if n > 1), "results")
    yield from brief((f"log {log} seq {seq} has no result" for seq, _ in items if seq not in times), "no result")
    yield from brief((f"log {log} seq {s} has a result, no item" for s in times if s >= len(items)), "no item")
    outcomes = Counter(result[3] for result in results)
    if (outcomes[1], outcomes[2], outcomes[3], outcomes[4]) != (done, failed, cancelled, skipped):
        yield f"log {log} counts {(done, failed, cancelled, skipped)}, its results are {dict(outcomes)}"


def _check_attempts(ledger: Ledger) -> Iterator[str]:
    """A result is of the last attempt, and of one that did not end otherwise; no attempt is open."""
    ended = {(log, seq, attempt): ending for log, seq, attempt, ending in ledger.attempts}
    last: dict[tuple[int, int], int] = defaultdict(int)
    for log, seq, attempt in ended:
        last[log, seq] = max(last[log, seq], attempt)
    have: set[tuple[int, int]] = set()
    for log, seq, attempt, *_ in ledger.results:
        have.add((log, seq))
        if (log, seq, attempt) in ended:
            yield f"log {log} seq {seq}: the result is of attempt {attempt}, which ended {ended[log, seq, attempt]}"
        elif attempt <= last[log, seq]:
            yield f"log {log} seq {seq}: the result is of attempt {attempt}, after attempt {last[log, seq]} had ended"
    for (keys,) in ledger.assignments:
        for log, seq, attempt in unpack_keys(bytes(keys)):
            if (log, seq) not in have and (log, seq, attempt) not in ended:
                yield f"log {log} seq {seq}: attempt {attempt} is still open"
