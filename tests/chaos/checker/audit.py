"""What triggers saw of every change: leases, epochs, writers, which attempt was current, cursors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from chaos.checker.ledger import Ledger, brief
from chaos.ledger_reader import Key, Row, unpack_keys


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
