"""Files of a job's directory, and what a line of them says of a trial."""

from __future__ import annotations

TRIALS, ERRORS, SUMMARY = "trials.jsonl", "errors.jsonl", "summary.json"
RESULT, CONFIG, STATISTICS = "result.json", "config.json", "stats.json"
PLACED = ".placed.jsonl"
"""For each trial what was put into its directory, so that a later command sees what is missing or was changed."""
ERROR_TEXT, TRIES = "error.txt", "tries"
"""In the directory of a trial."""
