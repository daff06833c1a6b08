"""From the commit log to files. Killed at any point, it loses nothing and writes nothing twice.

Outputs are appended and synced first, then `.collect.json` (cursor, lengths, totals) is replaced atomically. On the
next start the outputs are cut back to the recorded lengths and the log is read on from the recorded cursor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import Any

import structlog
from blake3 import blake3

from rollout.model.errors import ProtocolError
from rollout.model.item import Outcome
from rollout.workloads.commit import CommitEntry
from rollout.workloads.infer.config import SamplingSection
from rollout.workloads.infer.openai import openai_error, openai_line
from rollout.workloads.infer.output import STATE, GrowingFile, OutputDirectory, dump_line, write_atomically
from rollout.workloads.infer.payload import RowResult, decode_payload, decode_result
from rollout.workloads.infer.request import JsonObject, RowRequest, parse_row, sampling_json

_log = structlog.get_logger()

_CODES = {Outcome.CANCELLED: "cancelled", Outcome.SKIPPED: "skipped", Outcome.FAILED: "failed"}
# Keys of a row that are shown under another name, or in full elsewhere.
_NOT_EXTRA = frozenset({"id", "prompt", "messages", "body", "sampling"})
_SAVE_ROWS = 2000


@dataclass(slots=True)
class Totals:
    rows: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    skipped: int = 0
    attempts: int = 0
    retried: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    duration_ms: int = 0
    longest_ms: int = 0
    first_ms: int = 0
    last_ms: int = 0

    def count(self, entry: CommitEntry) -> None:
        self.rows += 1
        name = entry.outcome.name.lower()
        setattr(self, name, getattr(self, name) + 1)
        self.attempts += entry.attempt
        self.retried += max(0, entry.attempt - 1)
        self.prompt_tokens += entry.units_in
        self.completion_tokens += entry.units_out
        self.duration_ms += entry.duration_ms
        self.longest_ms = max(self.longest_ms, entry.duration_ms)
        self.first_ms = min(self.first_ms or entry.accepted_ms, entry.accepted_ms)
        self.last_ms = max(self.last_ms, entry.accepted_ms)


class Collector:
    """Writes one run's results into its output directory.

    Feed it the commit log from `cursor` on, in order, with add(); call flush() when the log pauses, finish() when the
    run has ended, close() always. StorageFullError and StorageError leave everything up to the last flush as it was.
    """

    def __init__(self, output: OutputDirectory, run_id: str, config: JsonObject) -> None:
        self._directory = output.path
        self._run_id = run_id
        self._config = config
        self._sampling = SamplingSection.model_validate(config["sampling"])
        names = ["completions.jsonl", "errors.jsonl"]
        if config["output"].get("openai"):
            names.append("openai.jsonl")
        self._files = {name: GrowingFile(self._directory / name) for name in names}
        self.cursor = 0
        self.totals = Totals()
        self._unsaved = 0
        self._restore()

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
        if state and all(intact) and marks.keys() == self._files.keys():
            self.cursor = state["cursor"]
            known = {field.name for field in fields(Totals)}
            self.totals = Totals(**{key: value for key, value in state["totals"].items() if key in known})
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
            self._write(entry)
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
        summary = self._summary(state, started_ms, ended_ms, worker_lost)
        if reason:
            summary["reason"] = reason
        write_atomically(self._directory / "summary.json", json.dumps(summary, indent=2).encode() + b"\n")
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

        return {
            "run_id": self._run_id,
            "state": state,
            "model_uri": self._config["model"]["uri"],
            "model_content_id": self._config["model"]["content_id"],
            "backend": self._config["backend"]["kind"],
            "rows": {
                "total": self._config["input"]["rows"],
                "committed": totals.rows,
                "completed": totals.done,
                "failed": totals.failed,
                "cancelled": totals.cancelled,
                "skipped": totals.skipped,
            },
            "tokens": {"prompt": totals.prompt_tokens, "completion": totals.completion_tokens},
            "rows_per_s": rate(totals.rows),
            "tokens_per_s": rate(totals.completion_tokens),
            "attempts": {"total": totals.attempts, "retried": totals.retried, "worker_lost": worker_lost},
            "durations": {
                "wall_s": wall_s,
                "attempt_mean_ms": round(totals.duration_ms / totals.rows, 3) if totals.rows else 0.0,
                "attempt_max_ms": totals.longest_ms,
            },
            "started_at": timestamp(started),
            "ended_at": timestamp(ended),
        }

    def _write(self, entry: CommitEntry) -> None:
        payload = decode_payload(entry.payload)
        openai = self._files.get("openai.jsonl")
        identity = row_id(payload.row, entry.id)
        if entry.outcome is Outcome.DONE:
            request, result = parse_row(payload.row, self._sampling), decode_result(entry.data)
            line = completion_line(payload.row, identity, request, result, entry, self._config["model"])
            self._files["completions.jsonl"].append(dump_line(line))
            if openai:
                openai.append(dump_line(openai_line(identity, request, result, entry, self._config["model"])))
            return
        code = entry.failure.code if entry.failure else _CODES[entry.outcome]
        message = entry.failure.message if entry.failure else f"the row was {_CODES[entry.outcome]}"
        error = {
            "id": identity,
            "row": payload.index,
            "file": payload.file,
            "line": payload.line,
            "code": code,
            "message": message,
            "attempts": entry.attempt,
            "failed_at": timestamp(entry.accepted_ms),
            "input": payload.row,
        }
        self._files["errors.jsonl"].append(dump_line(error))
        if openai:
            openai.append(dump_line(openai_error(identity, code, message, entry)))


def row_id(row: JsonObject, item: bytes) -> Any:
    """The row's own `id` or `custom_id`, else its item id in hex."""
    own = row.get("custom_id" if "body" in row else "id")
    return item.hex() if own is None else own


def completion_line(
    row: JsonObject, identity: Any, request: RowRequest, result: RowResult, entry: CommitEntry, model: JsonObject
) -> JsonObject:
    """A line of completions.jsonl. Extra input fields are kept; those named like one of ours move into `input`."""
    first = result.choices[0]
    line: JsonObject = {
        "id": identity,
        **request.content,
        "completion": first.text,
        "sampling_params": sampling_json(request.sampling),
        "model_uri": model["uri"],
        "finish_reason": first.finish_reason,
        "model_content_id": model["content_id"],
        "completion_blob_id": blake3(first.text.encode("utf-8", "surrogatepass")).hexdigest(),
        "generated_at": timestamp(entry.accepted_ms),
        "usage": {"prompt_tokens": result.prompt_tokens, "completion_tokens": sum(c.tokens for c in result.choices)},
    }
    if first.logprobs is not None:
        line["logprobs"] = first.logprobs
    if len(result.choices) > 1:
        line["completions"] = [
            {
                "text": choice.text,
                "finish_reason": choice.finish_reason,
                "tokens": choice.tokens,
                **({} if choice.logprobs is None else {"logprobs": choice.logprobs}),
            }
            for choice in result.choices
        ]
    extra = {key: value for key, value in row.items() if key not in _NOT_EXTRA}
    taken = {key: extra.pop(key) for key in list(extra) if key in line}
    line.update(extra)
    if taken:
        line["input"] = taken if "input" not in extra else {**taken, "input": extra["input"]}
    return line


def timestamp(unix_ms: int) -> str:
    """RFC 3339 in UTC with milliseconds."""
    return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
