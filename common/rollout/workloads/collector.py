"""From the commit log to files. Killed at any point, it loses nothing and writes nothing twice.

Outputs are appended and synced first, then `.collect.json` (cursor, lengths, totals) is replaced atomically. On the
next start the outputs are cut back to the recorded lengths and the log is read on from the recorded cursor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, fields

import structlog

from rollout.model.errors import ProtocolError
from rollout.workloads.commit import CommitEntry
from rollout.workloads.json_form import JsonObject, timestamp
from rollout.workloads.output import STATE, GrowingFile, OutputDirectory, write_atomically
from rollout.workloads.port import Totals, Writer

SUMMARY = "summary.json"
_log = structlog.get_logger()
_SAVE_ROWS = 2000


class Collector:
    """Writes one run's results into its output directory.

    Feed it the commit log from `cursor` on, in order, with add(); call flush() when the log pauses, finish() when the
    run has ended, close() always. StorageFullError and StorageError leave everything up to the last flush as it was.
    `unit`, `measure`: as of the workload. `total`: units of the input.
    """

    def __init__(
        self, output: OutputDirectory, run_id: str, writer: Writer, *, total: int, unit: str = "rows", measure: str = ""
    ) -> None:
        self._directory = output.path
        self._run_id = run_id
        self._writer = writer
        self._total = total
        self._unit = unit
        self._measure = measure
        self._files = {name: GrowingFile(self._directory / name) for name in writer.files}
        self.cursor = 0
        self.totals = Totals()
        self._unsaved = 0
        self._restore()

    @property
    def complete(self) -> bool:
        """Every unit of the input is final in the files, and none is there twice."""
        totals = self.totals
        final = totals.done + totals.failed + totals.cancelled + totals.skipped
        return self.cursor == totals.rows == final == self._total

    def _restore(self) -> None:
        path = self._directory / STATE
        state: JsonObject = {}
        try:
            state = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            _log.warning("collect_state_unreadable", path=str(path), error=str(error))
        if state.get("run_id") != self._run_id:
            state = {}
        marks = state.get("files", {})
        # All of them, so that every file is cut back even when one is not what it was.
        intact = [file.restore(marks.get(name)) for name, file in self._files.items()]
        counted = state.get("totals", {})
        known = {field.name for field in fields(Totals)}
        if state and all(intact) and marks.keys() == self._files.keys() and counted.keys() == known:
            self.cursor = state["cursor"]
            self.totals = Totals(**counted)
            return
        if state:
            _log.warning("collect_restarted", reason="the output files are not as they were left", run_id=self._run_id)
        for file in self._files.values():
            file.restore(None)

    def add(self, entries: Iterable[CommitEntry]) -> None:
        """Entries in commit order; those before the cursor are known and skipped. ProtocolError on a gap."""
        for entry in entries:
            if entry.position < self.cursor:
                continue
            if entry.position > self.cursor:
                raise ProtocolError(f"the commit log jumps from {self.cursor} to {entry.position}")
            lines = list(self._writer.lines(entry))  # all or none: what is appended is written by the next flush
            for name, line in lines:
                self._files[name].append(line)
            self.cursor += 1
            self.totals.count(entry)
            self._unsaved += 1
            if self._unsaved >= _SAVE_ROWS:
                self.flush()

    def flush(self) -> None:
        """Make everything added so far durable."""
        if not self._unsaved:
            return
        marks = {name: file.sync() for name, file in self._files.items()}
        state = {"run_id": self._run_id, "cursor": self.cursor, "files": marks, "totals": asdict(self.totals)}
        write_atomically(self._directory / STATE, json.dumps(state).encode())
        self._unsaved = 0

    def finish(
        self, state: str, *, started_ms: int = 0, ended_ms: int = 0, worker_lost: int = 0, reason: str = ""
    ) -> JsonObject:
        """Write summary.json and return it. Times in Unix milliseconds; 0: taken from the results."""
        self.flush()
        summary = self._writer.summary(self._summary(state, started_ms, ended_ms, worker_lost), self.totals)
        if reason:
            summary["reason"] = reason
        write_atomically(self._directory / SUMMARY, json.dumps(summary, indent=2).encode() + b"\n")
        return summary

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _summary(self, state: str, started_ms: int, ended_ms: int, worker_lost: int) -> JsonObject:
        totals = self.totals
        started, ended = started_ms or totals.first_ms, ended_ms or totals.last_ms
        wall_s = max(0, ended - started) / 1000

        def rate(count: int) -> float:
            return round(count / wall_s, 3) if wall_s else 0.0

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
                "cancelled": totals.cancelled,
                "skipped": totals.skipped,
            },
            **rates,
            "attempts": {"total": totals.attempts, "retried": totals.retried, "worker_lost": worker_lost},
            "durations": {
                "wall_s": wall_s,
                "attempt_mean_ms": round(totals.duration_ms / totals.rows, 3) if totals.rows else 0.0,
                "attempt_max_ms": totals.longest_ms,
            },
            "started_at": timestamp(started),
            "ended_at": timestamp(ended),
        }
