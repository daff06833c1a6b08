"""Writes the commit log to files. Killed at any point, it loses nothing and writes nothing twice.

It never trusts files unseen: `rollout.workloads.output` compares length and hash.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields

from rollout.model.errors import ProtocolError
from rollout.workloads.commit import CommitEntry
from rollout.workloads.invalid_result import lines_of
from rollout.workloads.json_form import JsonObject, timestamp
from rollout.workloads.output import MEMORY, OutputDirectory, ResultFiles
from rollout.workloads.port import (
    ArtifactWriter,
    Carrying,
    Ledger,
    Remembering,
    Running,
    Showing,
    StatusTable,
    Totals,
    Watching,
    Writer,
)

_SAVE_ROWS = 2000
_COUNTS = {field.name for field in fields(Totals)}
_SAVE_BYTES = 16 << 20
"""Maximum bytes of carried lines in memory."""
_PLACED_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Attempts:
    """The attempts of a run in its ledger: those that began, `retried` of which ended without ending their unit,
    `worker_lost` of which were lost with their worker. What was returned or stolen before it began does not count."""

    total: int = 0
    retried: int = 0
    worker_lost: int = 0


_NONE = Attempts()


class Collector:
    """Writes one run's results to its output directory.

    Feed it the commit log from `cursor` on, in order, with add(). Call flush() when the log pauses, finish() when the
    run has ended, and close() always. StorageFullError and StorageError leave everything up to the last flush
    unchanged. After OutputChangedError, because someone else changed a file, call restart() and feed it the whole log
    again.

    `unit` and `measure` are the workload's. `total` is the number of units in the input. `faults` has a line for each
    fault in the files of an earlier command; they are then written anew.
    """

    def __init__(
        self, output: OutputDirectory, run_id: str, writer: Writer, *, total: int, unit: str = "rows", measure: str = ""
    ) -> None:
        self._run_id = run_id
        self._writer = writer
        self._total = total
        self._unit = unit
        self._measure = measure
        self._files = ResultFiles(output.path, run_id, writer.files)
        self._unsaved = 0
        self.faults = self._files.begin()
        self.cursor = 0
        self.totals = Totals()
        if isinstance(writer, ArtifactWriter | Carrying):
            writer.open(output.path)
        counts = {key: value for key, value in self._files.totals.items() if key != MEMORY}
        remembers = isinstance(writer, Remembering)
        if counts.keys() == _COUNTS and remembers == (MEMORY in self._files.totals):
            self.cursor, self.totals = self._files.cursor, Totals(**counts)
            if isinstance(writer, Remembering):
                writer.memory = self._files.totals[MEMORY]
            if isinstance(writer, ArtifactWriter):
                writer.take_up()
        elif self._files.cursor:  # written by another version, which counted other things
            self.restart()

    @property
    def saved(self) -> int:
        """Number of entries that are durable in the files."""
        return self.cursor - self._unsaved

    @property
    def complete(self) -> bool:
        """Whether every unit of the input is final in the files, exactly once."""
        totals = self.totals
        final = totals.done + totals.failed + totals.cancelled + totals.skipped
        return self.cursor == totals.rows == final == self._total

    def expect(self, total: int) -> None:
        """Set the number of units in the input, which is known only now."""
        self._total = total

    @property
    def summary(self) -> JsonObject | None:
        """What finish() returned to an earlier command, if nothing has changed since."""
        return self._files.summary

    def restart(self) -> None:
        """Empty every file, to read the log again from its beginning."""
        # First: where a file cannot be emptied, a later flush must save nothing, and hide nothing of why.
        self.cursor, self.totals, self._unsaved = 0, Totals(), 0
        if isinstance(self._writer, Remembering):
            self._writer.memory = {}
        self._files.restart()
        self._begin()

    def _begin(self) -> None:
        """Write what precedes the lines of the first entry."""
        if isinstance(self._writer, ArtifactWriter):
            for name, lines in self._writer.begin():
                self._files.append(name, lines)

    async def place(self, entries: Sequence[CommitEntry], ledger: Ledger) -> list[str]:
        """Prepare what belongs to `entries`, which `add` gets next, and return notes for the user."""
        writer = self._writer
        if not isinstance(writer, ArtifactWriter):
            return []
        slots = asyncio.Semaphore(_PLACED_AT_ONCE)

        async def one(entry: CommitEntry) -> str:
            async with slots:
                return await writer.place(entry, ledger)

        placing = [asyncio.ensure_future(one(entry)) for entry in entries if entry.position >= self.cursor]
        try:
            return [text for text in await asyncio.gather(*placing) if text]
        finally:
            for task in placing:
                task.cancel()
            await asyncio.gather(*placing, return_exceptions=True)

    def refresh(self, state: str = "") -> None:
        """Update what the writer computes over all entries. `state` is that of a run that has ended. Blocking."""
        if isinstance(self._writer, ArtifactWriter):
            self._writer.refresh(state)

    def watch(self, state: str, reason: str) -> None:
        """Pass the state to a `Watching` writer."""
        if isinstance(self._writer, Watching):
            self._writer.watch(state, reason)

    @property
    def shows(self) -> bool:
        """Whether the writer has a board."""
        return isinstance(self._writer, Showing)

    def board(self, running: Sequence[Running], n_running: int) -> StatusTable | None:
        """Return the board of a `Showing` writer, or None."""
        return self._writer.board(running, n_running) if isinstance(self._writer, Showing) else None

    def add(self, entries: Iterable[CommitEntry]) -> None:
        """Add entries in commit order; those before the cursor are skipped. Raises ProtocolError on a gap."""
        for entry in entries:
            if entry.position < self.cursor:
                continue
            if entry.position > self.cursor:
                raise ProtocolError(f"the commit log jumps from {self.cursor} to {entry.position}")
            if not self._files.begun:
                self.restart()
            # All lines or none: what is appended is written by the next flush.
            counted, lines = lines_of(self._writer.lines, entry)
            if isinstance(self._writer, Carrying):
                self._carry(self._writer.before(entry))
            for name, line in lines:
                self._files.append(name, line)
            self._unsaved += 1  # first: `saved` is read meanwhile
            self.cursor += 1
            self.totals.count(counted)
            if self._unsaved >= _SAVE_ROWS:
                self.flush()

    def _carry(self, pieces: Iterable[tuple[str, bytes]]) -> None:
        """Append carried lines; the writer's memory has their position and is saved with them."""
        size = 0
        for name, lines in pieces:
            self._files.append(name, lines)
            size += len(lines)
            if size >= _SAVE_BYTES:
                self._files.save(self.cursor, self._counted())
                self._unsaved, size = 0, 0

    def flush(self) -> None:
        """Make everything added so far durable."""
        if self._unsaved:
            self._files.save(self.cursor, self._counted())
            self._unsaved = 0

    def finish(
        self,
        state: str,
        *,
        started_ms: int = 0,
        ended_ms: int = 0,
        busy_ms: int = 0,
        attempts: Attempts = _NONE,
        reason: str = "",
    ) -> JsonObject:
        """Check everything written, write summary.json and return it.

        Times are in Unix milliseconds; 0 takes them from the results. `busy_ms` is how long workers held some of the
        run, the basis of rates; 0 means all the time.
        """
        if not self._files.begun:
            self.restart()
        if state == "completed" and isinstance(self._writer, Carrying):
            self._carry(self._writer.rest())
        summary = self._writer.summary(self._summary(state, started_ms, ended_ms, busy_ms, attempts), self.totals)
        if reason:
            summary.setdefault("reason", reason)
        self._files.finish(self.cursor, self._counted(), summary)
        self._unsaved = 0
        return summary

    def _counted(self) -> JsonObject:
        memory = {MEMORY: self._writer.memory} if isinstance(self._writer, Remembering) else {}
        return asdict(self.totals) | memory

    def close(self) -> None:
        self._files.close()

    def _summary(self, state: str, started_ms: int, ended_ms: int, busy_ms: int, attempts: Attempts) -> JsonObject:
        totals = self.totals
        started, ended = started_ms or totals.first_ms, ended_ms or totals.last_ms
        wall_s = max(0, ended - started) / 1000
        busy_s = min(busy_ms / 1000, wall_s) or wall_s

        def rate(count: int) -> float:
            return round(count / busy_s, 3) if busy_s else 0.0

        rates = {f"{self._unit}_per_s": rate(totals.rows)}
        if self._measure:
            rates[f"{self._measure}_per_s"] = rate(totals.units_out)
        return {
            "run_id": self._run_id,
            "state": state,
            self._unit: {
                "total": self._total,
                "committed": totals.rows,
                "completed": totals.done,
                "failed": totals.failed,
                "invalid": totals.invalid,
                "cancelled": totals.cancelled,
                "skipped": totals.skipped,
            },
            **rates,
            "attempts": asdict(attempts),
            "durations": {
                "wall_s": wall_s,
                "busy_s": busy_s,
                "attempt_mean_ms": round(totals.duration_ms / totals.rows, 3) if totals.rows else 0.0,
                "attempt_max_ms": totals.longest_ms,
            },
            "started_at": timestamp(started),
            "ended_at": timestamp(ended),
        }
