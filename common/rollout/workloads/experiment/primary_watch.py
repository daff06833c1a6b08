"""Warns that trials do not report the primary metric, whose name may be misspelt, before all of them are paid for."""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path

from rollout.workloads.experiment.contracts import PASS_RATE_NAMES, SCORE
from rollout.workloads.experiment.layout import METRICS
from rollout.workloads.json_form import JsonObject

FIRST = 3
"""Number of completed trials without the metric after which the user is warned."""
_NAMES_MAX = 10


class PrimaryWatch:
    """`name` is that of the primary metric. Every trial has a score and a pass rate."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_reported = name in (SCORE, *PASS_RATE_NAMES)
        self._names: dict[str, None] = {}
        self._completed = 0
        self._has_warned = False

    def add_trial(self, trial: JsonObject) -> None:
        """Add a row of trials.jsonl."""
        self._completed += trial["status"] == "completed"

    def add_metric(self, name: str) -> None:
        self._is_reported = self._is_reported or name == self._name
        if len(self._names) < _NAMES_MAX:
            self._names[name] = None

    def take_up(self, directory: Path) -> None:
        """Add the metrics so far of the run in `directory`. Blocking."""
        path = directory / METRICS
        if self._is_reported or not path.exists():
            return
        with path.open("rb") as file:
            for line in file:
                self.add_metric(json.loads(line)["metric_name"])

    @property
    def is_missing(self) -> bool:
        """Whether trials completed and none reported the metric."""
        return self._completed > 0 and not self._is_reported

    def warning_once(self) -> str:
        """Return `warning` once, when the first trials completed without the metric; else ""."""
        if self._has_warned or not self.is_missing or self._completed < FIRST:
            return ""
        self._has_warned = True
        return self.warning()

    def warning(self) -> str:
        near = get_close_matches(self._name, self._names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"they report {', '.join(self._names) or 'no metric'}"
        count = "the completed trial does" if self._completed == 1 else f"the {self._completed:,} completed trials do"
        return f'primary_metric.name: {count} not report "{self._name}"; {hint}'
