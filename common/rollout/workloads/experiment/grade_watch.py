"""Notices a grader that leaves no grade in any trial, before all of them are paid for."""

from __future__ import annotations

from rollout.workloads.experiment.primary_watch import FIRST
from rollout.workloads.json_form import JsonObject

VERIFIER = "verifier_"
"""Before each type of error that a grader ends with."""


class GradeWatch:
    def __init__(self) -> None:
        self._graded = self._ungraded = 0
        self._last = ""
        self._has_warned = False

    def add_trial(self, trial: JsonObject) -> None:
        """A row of trials.jsonl."""
        kind = trial["classification"] or ""
        if trial["status"] == "completed":
            self._graded += 1
        elif kind.startswith(VERIFIER):
            self._ungraded += 1
            self._last = f"{kind}: {trial['error_message']}"

    @property
    def is_missing(self) -> bool:
        """Trials were to be graded, and none has a grade."""
        return self._ungraded > 0 and not self._graded

    def warning_once(self) -> str:
        """`warning`, when the first trials ended without a grade, the first time; else empty."""
        if self._has_warned or not self.is_missing or self._ungraded < FIRST:
            return ""
        self._has_warned = True
        return self.warning()

    def warning(self) -> str:
        count = "the trial" if self._ungraded == 1 else f"any of {self._ungraded:,} trials"
        return f"grading: the grader left no usable grade in {count}; the last one ended with {self._last}"
