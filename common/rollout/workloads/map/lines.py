"""Result lines and error lines."""

from __future__ import annotations

import json
from collections.abc import Iterator

from rollout.model.item import Outcome
from rollout.workloads.commit import CommitEntry
from rollout.workloads.invalid import invalid_of
from rollout.workloads.json_form import JsonObject, dump_line, parse_result
from rollout.workloads.map.failure import RowError, from_text
from rollout.workloads.port import Totals, unsuccessful

RESULTS, ERRORS, SUMMARY = "results.jsonl", "errors.jsonl", "summary.json"
PARQUET = "results.parquet"


def row_error(entry: CommitEntry) -> RowError:
    """Return why `entry` has no result."""
    why = unsuccessful(entry)
    return from_text(why.code, why.message)


class MapWriter:
    files: tuple[str, ...] = (RESULTS, ERRORS)

    def __init__(self, config: JsonObject) -> None:
        self._config = config

    def lines(self, entry: CommitEntry) -> Iterator[tuple[str, bytes]]:
        row, seconds = entry.seq + 1, entry.duration_ms / 1000
        if entry.outcome is Outcome.DONE:
            result = parse_result(entry.data)
            yield RESULTS, dump_line({"row": row, "result": result, "seconds": seconds, "attempts": entry.tries})
            return
        error = row_error(entry)
        line: JsonObject = {
            "row": row,
            "type": error.type,
            "message": error.message,
            "traceback": error.traceback,
            "code": error.code,
            "attempts": entry.tries,
            "seconds": seconds,
        }
        bad = invalid_of(entry.payload)
        if bad is None:
            line["input"] = json.loads(entry.payload)
        else:
            line |= {"file": bad.file, "line": bad.line, "input": bad.input}
        yield ERRORS, dump_line(line)

    def summary(self, summary: JsonObject, totals: Totals) -> JsonObject:
        return summary | {"function": self._config["function"], "code": self._config["code"].get("manifest", "")}
