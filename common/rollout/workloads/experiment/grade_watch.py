"""Warns of a grader that leaves no grade, before all trials are paid for."""

from __future__ import annotations

from rollout.workloads.experiment.primary_watch import FIRST
from rollout.workloads.json_form import JsonObject

VERIFIER = "verifier_"
"""Prefix of the types of errors with which a grader ends."""


class GradeWatch:
    def __init__(self) -> None:
        self._graded = self._ungraded = 0
        self._last = ""
        self._has_warned = False

    def add_trial(self, trial: JsonObject) -> None:
        """Add a row of trials.jsonl."""
        kind = trial["classification"] or ""
        if trial["status"] == "completed":
            self._graded += 1
        elif kind.startswith(VERIFIER):
            self._ungraded += 1
            self._last = f"{kind}: {trial['error_message']}"

    @property
    def is_missing(self) -> bool:
        """Whether trials should have been graded, and none was."""
        return self._ungraded > 0 and not self._graded

    def warning_once(self) -> str:
        """Return `warning` once, when the first trials ended without a grade; else ""."""
        if self._has_warned or not self.is_missing or self._ungraded < FIRST:
            return ""
        self._has_warned = True
        return self.warning()

    def warning(self) -> str:
        count = "the trial" if self._ungraded == 1 else f"any of {self._ungraded:,} trials"
        return f"grading: the grader left no usable grade in {count}; the last one ended with {self._last}"
