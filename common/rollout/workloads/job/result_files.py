"""Files of a job's directory, and what their lines say of a trial."""

from __future__ import annotations

TRIALS, ERRORS, SUMMARY = "trials.jsonl", "errors.jsonl", "summary.json"
RESULT, CONFIG, STATISTICS = "result.json", "config.json", "stats.json"
PLACED = ".placed.jsonl"
"""What was written to each trial's directory, so that a later command notices missing and changed files."""
ERROR_TEXT, TRIES = "error.txt", "tries"
"""Names in the directory of a trial."""
