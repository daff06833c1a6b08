"""Converts rows of the read queries to the values that core and services use. Both adapters share it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

from rollout.model.item import Blob, ObjectSlice, Outcome
from rollout.model.run import Order

from rollout_coordinator.core.events import Keys, Loaded, PendingItem, ResultsLoaded
from rollout_coordinator.core.step import LoadPending, LoadResults, OpenAttempt, Snapshot
from rollout_coordinator.ledger import queries, rows
from rollout_coordinator.ledger.port import (
    AttemptAt,
    CommitPage,
    EndedAttempt,
    EventsOf,
    FailureRow,
    ItemRecord,
    ItemStateRow,
    OutputRow,
    Seqs,
    Which,
)

Row = Sequence[Any]
SEQ_MAX = (1 << 63) - 1
Given = tuple[int, int, int, str, int]
"""(log, seq, attempt, worker, batch)"""


def size(blob: Blob) -> int:
    """Return the bytes it takes in memory and in a frame: a slice is only a reference."""
    return 48 if isinstance(blob, ObjectSlice) else len(blob)


def pending_item(row: Row) -> PendingItem:
    return PendingItem(row[0], bytes(row[1]), row[2], rows.blob(row[3], row[4], row[5], row[6]))


def add_history(items: list[PendingItem], history: Iterable[Row]) -> None:
    by_seq = {item.seq: item for item in items}
    for seq, attempts, failures, losses, not_before_ms, delay_ms, worker, code in history:
        item = by_seq.get(seq)
        if item is not None:
            item.attempts, item.failures, item.losses = int(attempts), int(failures), int(losses)
            item.not_before_ms, item.delay_ms = int(not_before_ms), int(delay_ms)
            item.failed_on, item.failed_by = worker, code


class PendingBuilder:
    """Collects pending rows until the load's limits are reached; always takes the first.

    `last` is the last row of the log, with or without a result, or None.
    """

    def __init__(self, load: LoadPending, last: int | None):
        self.behind = -1 if last is None else last + 1
        self.loaded = Loaded(load.load_id, load.log, [], load.from_seq, load.from_seq >= self.behind)
        self.complete = self.loaded.end or load.limit <= 0
        self._limit, self._max_bytes, self._left = load.limit, load.max_bytes, load.max_bytes

    @property
    def count(self) -> int:
        return len(self.loaded.items)

    @property
    def mean_bytes(self) -> int:
        """Average payload size of the rows so far."""
        return (self._max_bytes - self._left) // max(1, self.count)

    @property
    def next_seq(self) -> int:
        return self.loaded.next_seq

    @property
    def span(self) -> tuple[int, int] | None:
        items = self.loaded.items
        return (items[0].seq, items[-1].seq) if items else None

    def add(self, found: Iterable[Row], asked: int, to_seq: int) -> int:
        """Add rows of PENDING before `to_seq`. At most `asked` were requested, so fewer mean that there are no more.
        Returns the number of rows examined."""
        seen = 0
        for row in found:
            seen += 1
            item = pending_item(row)
            self._left -= size(item.payload)
            if self._left < 0 and self.loaded.items:
                self.complete = True
                return seen
            self.loaded.items.append(item)
            self.loaded.next_seq = item.seq + 1
        if seen < asked:
            self.loaded.next_seq = min(to_seq, self.behind)
        self.loaded.end = self.next_seq >= self.behind
        self.complete = self.loaded.end or self.count >= self._limit
        return seen


class PageBuilder:
    """Collects rows of a commit page until `max_bytes` are reached; always takes the first."""

    def __init__(self, from_cursor: int, max_bytes: int, payloads: bool):
        self.page = CommitPage(from_cursor, [], [], [], [], {}, [], [], [], [], [], [], [], [])
        self._left = max_bytes
        self._payloads = payloads

    def add(self, row: Row) -> bool:
        """Add a row, or return False if the page is full."""
        page = self.page
        data = rows.blob(row[3], row[4], row[5], row[6])
        payload = rows.blob(row[17], row[18], row[19], row[20]) if self._payloads else b""
        self._left -= size(data) + size(payload)
        if self._left < 0 and page.seq:
            return False
        if row[7] is not None:
            page.failures[len(page.seq)] = rows.failure(row[7], row[8], row[9])
        page.seq.append(row[0])
        page.attempt.append(row[1])
        page.outcome.append(Outcome(row[2]))
        page.data.append(data)
        page.duration_ms.append(row[10])
        page.accepted_ms.append(row[11])
        page.worker.append(row[12])
        page.units_in.append(row[13])
        page.units_out.append(row[14])
        page.tries.append(row[15])
        if self._payloads:
            page.ids.append(bytes(row[16]))
            page.payloads.append(payload)
        return True


def results_loaded(load: LoadResults, found: Iterable[Row]) -> ResultsLoaded:
    loaded = ResultsLoaded(load.load_id, load.log, load.first_seq, [], [], [], [], {}, [])
    for row in found:
        if row[7] is not None:
            loaded.failures[len(loaded.seq)] = rows.failure(row[7], row[8], row[9])
        loaded.seq.append(row[0])
        loaded.attempt.append(row[1])
        loaded.outcome.append(Outcome(row[2]))
        loaded.data.append(rows.blob(row[3], row[4], row[5], row[6]) if load.with_data else b"")
        loaded.spec.append(row[10])
    return loaded


_OUTCOMES = {Outcome.FAILED: "failed", Outcome.CANCELLED: "cancelled", Outcome.SKIPPED: "skipped"}


def item_state(row: Row) -> ItemStateRow:
    """Convert a row of STATES_AT or ITEM_AT."""
    state = "open"
    if row[2] is not None:
        state = _OUTCOMES.get(Outcome(row[2]), "done" if row[3] else "accepted")
    return ItemStateRow(
        row[0], bytes(row[1]), state, int(row[4]), row[5] or "", row[6] or 0, row[7] or 0, row[8] or "", row[9] or ""
    )


def item_record(row: Row, attempts: Iterable[Row]) -> ItemRecord:
    """Convert a row of ITEM_AT and rows of ATTEMPTS_AT."""
    ended = list(map(ended_attempt, attempts))
    result = None if row[2] is None else rows.blob(row[15], row[16], row[17], row[18])
    return ItemRecord(
        item_state(row), row[10], rows.blob(row[11], row[12], row[13], row[14]), result, row[19] or 0, row[20] or 0,
        row[21] or 0, ended[::-1],
    )  # fmt: skip


def ended_attempt(row: Row) -> EndedAttempt:
    """Convert a row of ATTEMPTS_AT or ATTEMPTS_AFTER."""
    attempt, worker, ending, code, message, began_ms, at_ms, units_in, units_out, *data = row[:13]
    return EndedAttempt(attempt, worker, ending, code, message, began_ms, at_ms, units_in, units_out, rows.blob(*data))


def attempts_page(found: Iterable[Row], max_bytes: int) -> list[AttemptAt]:
    """Convert rows of ATTEMPTS_AFTER: as many as fit, at least one."""
    page: list[AttemptAt] = []
    for row in found:
        one = ended_attempt(row)
        max_bytes -= size(one.data) + 4 * len(one.message)
        if max_bytes < 0 and page:
            break
        page.append(AttemptAt(row[13], one))
    return page


def last_failures(found: Iterable[Row], limit: int) -> list[FailureRow]:
    """Convert rows of LAST_FAILED and LAST_FAILED_ATTEMPTS, the newest first."""
    failures = [FailureRow(*row[:6], final=bool(row[6])) for row in found]
    return sorted(failures, key=lambda one: (one.at_ms, one.final, one.seq), reverse=True)[:limit]


SEQS_OF = {
    Which.FAILED: queries.FAILED_SEQS,
    Which.RETRIED: queries.RETRIED_SEQS,
    Which.OPEN: queries.OPEN_SEQS,
}
OPEN_SPAN = 10_000
"""Rows that a page of open ones examines: most of them may have results."""


def seqs_found(which: Which, found: list[int], asked: int, to_seq: int, end: int) -> Seqs:
    """Return the result of a query for `asked` rows before `to_seq`; `end` is after the last row of the log."""
    if len(found) == asked:
        return Seqs(found, found[-1] + 1, found[-1] + 1 >= end)
    if which in (Which.FAILED, Which.RETRIED):
        return Seqs(found, end, True)
    return Seqs(found, min(to_seq, end), to_seq >= end)


# ---- history, for people

CHUNKS = 64
"""Rows of output to read at once."""


def output_over(found: Sequence[Row], most: int) -> list[tuple[str, int, int]]:
    """Return, from OUTPUT_BY_RUN, the runs whose output to remove: (run, bytes, last position)."""
    total = sum(int(row[1]) for row in found)
    gone: list[tuple[str, int, int]] = []
    for run_id, size, last in found:  # ULIDs: the oldest first
        if total <= most:
            break
        if size:
            gone.append((run_id, int(size), last))
            total -= int(size)
    return gone


def output_rows(found: Iterable[Row], max_bytes: int) -> list[OutputRow]:
    kept: list[OutputRow] = []
    for position, size, worker, lines in found:
        max_bytes -= len(lines)
        if kept and max_bytes < 0:
            break
        kept.append(OutputRow(position, size, worker, bytes(lines)))
    return kept


def events_of(of: EventsOf, after: int, limit: int) -> dict[str, Any]:
    """Return the parameters of EVENTS_AFTER and NEWEST_EVENTS."""
    return {"every": int(not of.run_id), "after": after, "n": limit, **of._asdict()}


class Replay:
    """Builds a Snapshot step by step from the answers to its queries."""

    def __init__(self) -> None:
        self.snapshot = Snapshot()
        self._batches: list[int] = []
        self._arrival: set[int] = set()
        self._given: list[Given] = []

    def logs(self, found: Iterable[Row]) -> None:
        """Add rows of LIVE_LOGS."""
        for row in found:
            log = rows.log_row(row)
            self.snapshot.logs.append(log)
            if row[-1] == Order.ARRIVAL.value and log.parent_log == 0:
                self._arrival.add(log.log)

    def ranges_wanted(self) -> list[tuple[int, int]]:
        """Return (log, from seq) of the logs that may have accepted results: in arrival order, results are anywhere."""
        submitted = {log.log: log.submitted for log in self.snapshot.logs}
        return [(log, start) for log, start in self._starts() if start < submitted[log]]

    def _starts(self) -> list[tuple[int, int]]:
        """Return, by log, the first seq that may have no result."""
        return [(log.log, 0 if log.log in self._arrival else log.cursor) for log in self.snapshot.logs]

    def ranges(self, found: Iterable[Row]) -> None:
        """Add rows of ACCEPTED_RANGES."""
        for log, first, last in found:
            self.snapshot.accepted.setdefault(log, []).append((first, last))

    def grouped(self) -> list[dict[str, int]]:
        """Return parameters of WON for the root logs of runs with groups; must follow `specs`."""
        runs = {row.run_id for row in self.snapshot.specs if row.spec.group}
        return [
            {"log": log.log, "before": SEQ_MAX if log.log in self._arrival else log.cursor}
            for log in self.snapshot.logs
            if log.parent_log == 0 and log.run_id in runs
        ]

    def won(self, log: int, found: Iterable[Row]) -> None:
        """Add rows of WON."""
        self.snapshot.won += [(log, spec, seq) for spec, seq in found]

    def assignments(self, found: Iterable[Row]) -> None:
        """Add rows of LIVE_ASSIGNMENTS; must follow `ranges`. Attempts of finished logs, and of items with a result,
        are not open: these are already known, so the database need not be asked for each."""
        live = {log: _WithoutResult(start, self.snapshot.accepted.get(log, [])) for log, start in self._starts()}
        for batch, worker, packed in found:
            self._batches.append(batch)
            for group in rows.unpack_keys(packed):
                without_result = live.get(group.log)
                if without_result is not None:
                    self._given.extend((group.log, s, a, worker, batch) for s, a in _pairs(group) if without_result(s))
        # In key order the look-ups walk the index, which is several times faster on a cold cache.
        self._given.sort()

    def given(self, chunk: int) -> Iterable[tuple[int, list[Given]]]:
        for at in range(0, len(self._given), chunk):
            yield at, self._given[at : at + chunk]

    def open(self, at: int, found: Iterable[Row]) -> None:
        """Add rows of OPEN_ATTEMPTS for the chunk that began at `at`."""
        for n, spec, failures, losses, failed_on, failed_by in found:
            log, seq, attempt, worker, batch = self._given[at + int(n)]
            self.snapshot.open_attempts.append(
                OpenAttempt(log, seq, attempt, worker, batch, spec, failures, losses, failed_on, failed_by)
            )

    def finish(self) -> list[int]:
        """Return batches without an open attempt, which nobody else will retire."""
        used = {attempt.batch for attempt in self.snapshot.open_attempts}
        self.snapshot.open_attempts.sort(key=lambda a: (a.batch, a.log, a.seq))
        return [batch for batch in self._batches if batch not in used]


class _WithoutResult:
    """Tells whether an item of a log has no result, from its first unknown seq and the ranges of results after it."""

    def __init__(self, start: int, ranges: list[tuple[int, int]]):
        self._start = start
        self._firsts = [first for first, _ in ranges]
        self._lasts = [last for _, last in ranges]

    def __call__(self, seq: int) -> bool:
        if seq < self._start:
            return False
        at = bisect_right(self._firsts, seq) - 1
        return at < 0 or seq > self._lasts[at]


def _pairs(group: Keys) -> Iterable[tuple[int, int]]:
    return zip(group.seq, group.attempt, strict=True)
