"""Results and errors as lines of files."""

from __future__ import annotations

import json
from collections.abc import Iterator

from rollout.model.errors import HopelessError
from rollout.model.item import Outcome
from rollout.workloads.commit import CommitEntry
from rollout.workloads.invalid import invalid_of
from rollout.workloads.json_form import JsonObject, dump_line
from rollout.workloads.map.failure import LOAD_FAILED, RowError, from_text
from rollout.workloads.port import Totals, unsuccessful

RESULTS, ERRORS, SUMMARY = "results.jsonl", "errors.jsonl", "summary.json"
_STARTS = frozenset({LOAD_FAILED, "engine_start"})
"""Codes of failures that are of the run and not of a row: whatever the row, the function cannot be called."""


class UnloadableError(HopelessError):
    """The function cannot be loaded on the workers."""

    code = LOAD_FAILED


def row_error(entry: CommitEntry) -> RowError:
    """Why `entry` has no result. UnloadableError where no row will have one."""
    why = unsuccessful(entry)
    error = from_text(why.code, why.message)
    if error.code in _STARTS:
        where = error.traceback.splitlines()[1:-1]  # the frames: what is before and after them is said already
        raise UnloadableError("\n".join([f"the function cannot be loaded: {error}", *where]))
    return error


class MapWriter:
    files: tuple[str, ...] = (RESULTS, ERRORS)

    def __init__(self, config: JsonObject) -> None:
        self._config = config

    def lines(self, entry: CommitEntry) -> Iterator[tuple[str, bytes]]:
        row, seconds = entry.seq + 1, json.dumps(entry.duration_ms / 1000)
        if entry.outcome is Outcome.DONE:
            # The result's bytes as the function's process made them: parsing them would only cost time.
            tail = f',"seconds":{seconds},"attempts":{entry.tries}}}\n'.encode()
            yield RESULTS, b'{"row":%d,"result":%s%s' % (row, entry.data, tail)
            return
        error = row_error(entry)
        line: JsonObject = {
            "row": row,
            "type": error.type,
            "message": error.message,
            "traceback": error.traceback,
            "code": error.code,
            "attempts": entry.tries,
            "seconds": entry.duration_ms / 1000,
        }
        bad = invalid_of(entry.payload)
        if bad is None:
            line["input"] = json.loads(entry.payload)
        else:
            line |= {"file": bad.file, "line": bad.line, "input": bad.input}
        yield ERRORS, dump_line(line)

    def summary(self, summary: JsonObject, totals: Totals) -> JsonObject:
        return summary | {"function": self._config["function"], "code": self._config["code"].get("manifest", "")}
