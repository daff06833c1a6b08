"""The independent checker: what the ledger, its audit and the output files must agree on, whatever happened.

Plain data in, objections out; nothing of the engine is imported. An objection is a sentence; none means that every row
is there once, in order, from a current attempt under a current epoch, and that nobody claimed otherwise.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from blake3 import blake3

from chaos.ledger_reader import Key, Reader, Row, Snapshot, unpack_keys

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


# ---- while it runs


def consistent(seen: Snapshot) -> list[str]:
    """Done only when the ledger says so."""
    found = [
        f"log {log} committed {cursor} of {seen.ends[log][0]}"
        for log, cursor in seen.cursors.items()
        if cursor > seen.ends[log][0]
    ]
    for run, state in seen.states.items():
        log = seen.logs[run]
        submitted, sealed = seen.ends[log]
        if state == "completed" and not (sealed and seen.cursors[log] == submitted):
            found.append(f"run {run} is completed with {seen.cursors[log]} of {submitted} committed, sealed: {sealed}")
    return found


def compare(before: Snapshot, after: Snapshot) -> list[str]:
    """Nothing that was final changed between two looks."""
    found: list[str] = []
    if after.epoch < before.epoch:
        found.append(f"the epoch went from {before.epoch} back to {after.epoch}")
    if after.batch < before.batch:
        found.append(f"the batch number went from {before.batch} back to {after.batch}")
    for log, cursor in before.cursors.items():
        if log not in after.cursors:
            found.append(f"log {log} is gone")
            continue
        if after.cursors[log] < cursor:
            found.append(f"the cursor of log {log} went from {cursor} back to {after.cursors[log]}")
        if after.ends[log][0] < before.ends[log][0] or after.ends[log][1] < before.ends[log][1]:
            found.append(f"log {log} had {before.ends[log]} (submitted, sealed), now {after.ends[log]}")
    for run, state in before.states.items():
        if state == "completed" and after.states.get(run) != "completed":
            found.append(f"run {run} was completed and is {after.states.get(run)}")
    return found


# ---- afterwards: the ledger


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


# ---- afterwards: the audit


def check_audit(
    ledger: Ledger, leaders: Mapping[int, str] | None = None, writers: Mapping[int, set[str]] | None = None
) -> list[str]:
    """What the triggers saw. `leaders`: epoch to coordinator; `writers`: port at PostgreSQL to coordinators."""
    found = list(_check_leases(ledger))
    for name, rows in (
        ("result", ledger.seen_results),
        ("assignment", ledger.seen_assignments),
        ("cursor", ledger.seen_cursors),
    ):
        found += brief(_check_epochs(name, rows), f"epochs of {name}s")
        if writers:
            found += brief(_check_writers(name, rows, leaders or {}, writers), f"writers of {name}s")
    found += brief(_check_currency(ledger), "stale results")
    found += brief(_check_cursors(ledger), "cursors")
    return found


def _check_leases(ledger: Ledger) -> Iterator[str]:
    epoch, batch = -1, 0
    for _, before, after, batch_before, batch_after, _, _ in ledger.seen_leases:
        if before != epoch or after != epoch + 1:
            yield f"the epoch went from {epoch} over {before} to {after}"
        if batch_after < batch_before or batch_before < batch:
            yield f"the batch number went back: {batch}, {batch_before}, {batch_after}"
        epoch, batch = after, batch_after
    for now, number in ledger.lease:
        if now != epoch or number < batch:
            yield f"the lease is at epoch {now} batch {number}; the last change was to {epoch}, {batch}"


def _check_epochs(name: str, rows: Iterable[Row]) -> Iterator[str]:
    """In the order in which they were written, epoch and batch never go back."""
    last = (-1, -1)
    for row in rows:
        mark = (row[-3], row[-2])
        if mark[0] < last[0] or mark[1] < last[1]:
            yield f"{name} {row[0]} was written under epoch {mark[0]} batch {mark[1]} after {last}"
        last = max(last, mark)


def _check_writers(
    name: str, rows: Iterable[Row], leaders: Mapping[int, str], writers: Mapping[int, set[str]]
) -> Iterator[str]:
    """Only the coordinator that holds an epoch writes under it."""
    for row in rows:
        epoch, port = row[-3], row[-1]
        if leaders.get(epoch) not in writers.get(port, set()):
            yield f"{name} {row[0]} of epoch {epoch}, led by {leaders.get(epoch)}, was written by {writers.get(port)}"


def _check_currency(ledger: Ledger) -> Iterator[str]:
    """Each result is of the attempt that was current when it was accepted, by the worker that had it."""
    given: dict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)  # attempt, batch, worker
    holder: dict[Key, str] = {}
    for _, worker, keys, _, batch, _ in ledger.seen_assignments:
        for log, seq, attempt in unpack_keys(bytes(keys)):
            if holder.setdefault((log, seq, attempt), worker) != worker:
                yield f"log {log} seq {seq} attempt {attempt} was given to {holder[log, seq, attempt]} and to {worker}"
            given[log, seq].append((attempt, batch, worker))
    rows = {(row[0], row[1]): row for row in ledger.results}
    seen: set[tuple[int, int]] = set()
    for _, log, seq, attempt, worker, _, batch, _ in ledger.seen_results:
        place = f"log {log} seq {seq}"
        if (log, seq) in seen:
            yield f"{place}: a second result was written"
        seen.add((log, seq))
        row = rows.get((log, seq))
        if row is None:
            yield f"{place}: a result was written and is gone"
        elif (row[2], row[5]) != (attempt, worker):
            yield f"{place}: attempt {attempt} of {worker} was written, attempt {row[2]} of {row[5]} is there"
        if attempt == 0:
            continue  # closed without an attempt; the batch's files say whether it may be
        if holder.get((log, seq, attempt)) != worker:
            yield f"{place}: attempt {attempt} belonged to {holder.get((log, seq, attempt))}, the result is {worker}'s"
        newer = [a for a, at, _ in given[log, seq] if a > attempt and at < batch]
        if newer:
            yield f"{place}: the result of attempt {attempt} was accepted after attempt {max(newer)} was given out"
    yield from (f"log {log} seq {seq}: a result that nobody wrote" for log, seq in rows if (log, seq) not in seen)


def _check_cursors(ledger: Ledger) -> Iterator[str]:
    """The cursor of a log moves forward without a jump, and only over results that are there."""
    written: dict[int, dict[int, int]] = defaultdict(dict)  # log: seq: batch of its result
    for _, log, seq, _, _, _, batch, _ in ledger.seen_results:
        written[log][seq] = batch
    arrival = {log for _, log, _, order in ledger.runs if order == "arrival"}
    at: dict[int, int] = defaultdict(int)
    for _, log, before, after, _, batch, _ in ledger.seen_cursors:
        if before != at[log] or after <= before:
            yield f"log {log}: the cursor was at {at[log]} and moved from {before} to {after}"
        if log in arrival:
            if sum(1 for b in written[log].values() if b <= batch) < after:
                yield f"log {log}: {after} committed in batch {batch}, fewer results are there"
        else:
            missing = [seq for seq in range(before, after) if written[log].get(seq, batch + 1) > batch]
            if missing:
                yield f"log {log}: the cursor passed seq {missing[0]} before its result was there"
        at[log] = after
    for row in ledger.logs:
        if row[3] != at[row[0]]:
            yield f"log {row[0]}: the cursor is at {row[3]}, the last move was to {at[row[0]]}"


# ---- afterwards: the files of a batch


@dataclass(frozen=True)
class Expected:
    """What was asked for. `rows` as in the input file; those whose prompt contains `poison` must fail."""

    directory: Path
    rows: list[dict[str, Any]]
    poison: str = ""


def check_files(expected: Expected, ledger: Ledger) -> list[str]:
    """Every row once over completions.jsonl and errors.jsonl, in the order of the commit log, as the ledger has it."""
    run_id = (expected.directory / "run-id").read_text().strip()
    run = next((row for row in ledger.runs if row[0] == run_id), None)
    if run is None:
        return [f"{expected.directory}: run {run_id} is not in the ledger"]
    results = {row[1]: row for row in ledger.results if row[0] == run[1]}
    found: list[str] = []
    done = _lines(expected.directory / "completions.jsonl", found)
    failed = _lines(expected.directory / "errors.jsonl", found)
    numbers = [line["n"] for line in done] + [line["input"]["n"] for line in failed]
    times = Counter(numbers)
    found += brief((f"row {n} is there {k} times" for n, k in times.items() if k > 1), "rows more than once")
    found += brief((f"row {row['n']} is nowhere" for row in expected.rows if row["n"] not in times), "rows missing")
    found += brief((f"row {n} was never asked for" for n in set(times) - {r["n"] for r in expected.rows}), "rows")
    found += brief(_order("completions.jsonl", [line["n"] for line in done], results, run[3]), "order")
    found += brief(_order("errors.jsonl", [line["input"]["n"] for line in failed], results, run[3]), "order")
    found += brief(_content(expected, done, failed, results), "content")
    found += _summary(expected, run_id, done, failed, results)
    return [f"{expected.directory}: {objection}" for objection in found]


def _lines(path: Path, found: list[str]) -> list[dict[str, Any]]:
    data = path.read_bytes() if path.exists() else b""
    if data and not data.endswith(b"\n"):
        found.append(f"{path.name} ends in half a line")
    lines: list[dict[str, Any]] = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            lines.append(json.loads(line))
        except ValueError:
            found.append(f"{path.name}:{number} is not JSON")
    return lines


def _order(name: str, numbers: list[int], results: Mapping[int, Row], order: str) -> Iterator[str]:
    places = [(n if order != "arrival" else results[n][7], n) for n in numbers if n in results]
    for (earlier, _), (later, n) in pairwise(places):
        if earlier >= later:
            yield f"{name}: row {n} is out of order"
    if order == "arrival" and sorted(row[7] for row in results.values()) != list(range(len(results))):
        yield f"{name}: the places in the commit log are not 0 to {len(results) - 1}"


def _content(
    expected: Expected, done: list[dict[str, Any]], failed: list[dict[str, Any]], results: Mapping[int, Row]
) -> Iterator[str]:
    rows = {row["n"]: row for row in expected.rows}
    for line in done:
        n = line["n"]
        row, result = rows.get(n), results.get(n)
        if row is None or result is None:
            yield f"completed row {n} has no result in the ledger or was not asked for"
            continue
        if result[3] != DONE:
            yield f"row {n} is completed in the file, its outcome in the ledger is {result[3]}"
        if line["prompt"] != row["prompt"] or line["completion"] != f"MOCK:{row['prompt']}":
            yield f"row {n} has another row's prompt or completion"
        if line["completion_blob_id"] != blake3(line["completion"].encode()).hexdigest():
            yield f"row {n}: completion_blob_id is not the hash of the completion"
        if line["generated_at"] != _time(result[6]):
            yield f"row {n} was generated at {line['generated_at']}, accepted at {_time(result[6])}"
        if result[8] is not None and json.loads(bytes(result[8]))["choices"][0]["text"] != line["completion"]:
            yield f"row {n}: the ledger holds another completion than the file"
        if expected.poison and expected.poison in row["prompt"]:
            yield f"row {n} had to fail and is completed"
    for line in failed:
        n = line["input"]["n"]
        result = results.get(n)
        if result is None or result[3] != FAILED or result[4] != line["code"] or result[2] != line["attempts"]:
            yield f"row {n} failed with {line['code']} after {line['attempts']}, the ledger has {result and result[2:6]}"
        meant = bool(expected.poison) and expected.poison in rows.get(n, {}).get("prompt", "")
        if not meant or line["code"] != "mock_failure":
            yield f"row {n} failed with {line['code']}: {line['message']}"


def _summary(
    expected: Expected,
    run_id: str,
    done: list[dict[str, Any]],
    failed: list[dict[str, Any]],
    results: Mapping[int, Row],
) -> Iterator[str]:
    path = expected.directory / "summary.json"
    if not path.exists():
        yield "there is no summary.json"
        return
    claim = json.loads(path.read_text())
    counts = claim["rows"]
    truth = {
        "run_id": (claim["run_id"], run_id),
        "state": (claim["state"], "completed"),
        "rows.total": (counts["total"], len(expected.rows)),
        "rows.committed": (counts["committed"], len(results)),
        "rows.completed": (counts["completed"], len(done)),
        "rows.failed": (counts["failed"], len(failed)),
        "attempts.total": (claim["attempts"]["total"], sum(row[2] for row in results.values())),
    }
    for key, (claimed, true) in truth.items():
        if claimed != true:
            yield f"summary.json claims {key} = {claimed}, it is {true}"


def _time(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# ---- afterwards: the logs


@dataclass(frozen=True)
class Window:
    """A fault: Unix times from strike to settled, and the worker whose failure it explains ('': any, None: no one's)."""

    begin: float
    end: float
    blames: str | None


def unexplained(
    failures: Iterable[tuple[float, str, str]], faults: Iterable[Window], killed: set[str], grace_s: float
) -> list[str]:
    """`worker_failed` at a time, of a worker and its incarnation, that nothing explains.

    A killed incarnation is found dead whenever there is a coordinator to find it. Otherwise a fault of that worker must
    have begun before and not be over for longer than `grace_s`; one that overlaps others (the coordinator may have been
    away meanwhile) is over when they are.
    """
    windows = _until_all_is_over(sorted(faults, key=lambda window: window.begin), grace_s)
    return [
        f"worker_failed of {worker} at {at:.1f} without a fault that explains it"
        for at, worker, incarnation in failures
        if incarnation not in killed
        and not any(w.begin <= at <= w.end + grace_s and w.blames in ("", worker) for w in windows)
    ]


def _until_all_is_over(windows: list[Window], grace_s: float) -> list[Window]:
    """Each with the end of those that began while it, or its grace, lasted."""
    found: list[Window] = []
    for n, window in enumerate(windows):
        end = window.end
        for later in windows[n + 1 :]:
            if later.begin > end + grace_s:
                break
            end = max(end, later.end)
        found.append(Window(window.begin, end, window.blames))
    return found
