"""From results of a training run to its files."""

from __future__ import annotations

import json
from collections.abc import Iterator

from rollout.model.item import Outcome
from rollout.workloads.commit import CommitEntry
from rollout.workloads.json_form import JsonObject, dump_line
from rollout.workloads.port import Totals, unsuccessful
from rollout.workloads.train.segment import Result, Segment

METRICS, EVALUATIONS, REPORT, SUMMARY = "metrics.jsonl", "eval.jsonl", "data-report.json", "summary.json"
ERRORS = "errors.jsonl"
_OF_THE_USER = ("invalid_data", "tokenizer_invalid", "model_invalid")
"""Why data cannot be used that is for the person to mend."""


class TrainWriter:
    files: tuple[str, ...] = (METRICS, EVALUATIONS, REPORT, ERRORS)

    def __init__(self, config: JsonObject) -> None:
        self._config = config
        self._last = Result()
        self._failed = ""
        self._refused = ""

    def lines(self, entry: CommitEntry) -> Iterator[tuple[str, bytes]]:
        segment = Segment.decode(entry.payload)
        if entry.outcome is Outcome.SKIPPED:
            return
        if entry.outcome is not Outcome.DONE:
            why = unsuccessful(entry, "segment")
            where = "the data cannot be used" if segment.op == "prepare" else f"after step {segment.first}"
            self._failed = f"{where}: {why.message}"
            self._refused = why.message if segment.op == "prepare" and why.code in _OF_THE_USER else ""
            line = {"first_step": segment.first + 1, "op": segment.op, "code": why.code, "message": why.message}
            yield ERRORS, dump_line({**line, "attempts": entry.tries})
            return
        result = self._last = Result.decode(entry.data)
        if segment.op == "prepare":
            overlap = self._config["evaluation"].get("overlap") if self._config.get("evaluation") else None
            report = result.report if overlap is None else {**result.report, "overlap": overlap}
            yield REPORT, json.dumps(report, indent=2).encode() + b"\n"
            return
        for metrics in result.metrics:
            yield METRICS, dump_line(metrics)
        for evaluation in result.evaluations:
            yield EVALUATIONS, dump_line(evaluation)

    def summary(self, summary: JsonObject, totals: Totals) -> JsonObject:
        last = self._last
        failed = {"reason": self._failed} if self._failed else {}
        failed |= {"refused": self._refused} if self._refused else {}
        return (
            summary
            | failed
            | {
                "algorithm": self._config["algorithm"]["kind"],
                "model_uri": self._config["model"]["uri"],
                "steps": last.step,
                "stopped_early": last.stopped,
                "tokens": totals.units_out,
                "final_snapshot": last.snapshot,
                "weights_hash": last.weights,
                "fingerprint": last.fingerprint,
                **last.model,
            }
        )
