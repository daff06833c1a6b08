"""results.jsonl: a line for each test, with all of its tries. Only this module reads and writes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rollout.model.errors import InputError
from rollout.workloads.json_form import JsonObject, dump_line
from rollout.workloads.test.cases import GOOD, Case, CaseResult, Status

RESULTS = "results.jsonl"
BAD = frozenset(status.value for status in Status if status.value not in GOOD and status is not Status.FLAKY)
"""Statuses of tests that fail a run."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line. If `quarantined` is set, the failure does not fail the run; it says why."""

    case: Case
    result: CaseResult
    quarantined: str = ""

    @property
    def fails(self) -> bool:
        return self.result.status in BAD and not self.quarantined

    def encode(self) -> bytes:
        case, last = self.case, self.result.tries[-1]
        value: JsonObject = {
            "id": case.id,
            "group": case.group,
            "outcome": self.result.status.value,
            "seconds": round(sum(one.seconds for one in self.result.tries), 6),
            "worker": last.worker,
            "attempts": [one.model_dump(mode="json", exclude_defaults=True) for one in self.result.tries],
            "framework": case.framework,
            "file": case.file,
            "line": case.line,
        }
        if self.quarantined:
            value["quarantined"] = self.quarantined
        return dump_line(value)


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the lines. Raises InputError if the file is missing or of another kind."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                yield _parse(raw, f"{path}:{number}")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def _parse(raw: bytes, where: str) -> Line:
    try:
        value: Any = json.loads(raw)
        case = Case(
            id=value["id"],
            group=value["group"],
            framework=value["framework"],
            file=value["file"],
            line=value["line"],
        )
        result = CaseResult.model_validate({"id": case.id, "group": case.group, "tries": value["attempts"]})
        return Line(case, result, str(value.get("quarantined", "")))
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise InputError(f"{where}: is no line that `rollout test` wrote: {error}") from error
