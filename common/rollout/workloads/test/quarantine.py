"""Tests that are known to fail, until a day."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date
from fnmatch import fnmatchcase

from rollout.workloads.test.cases import Case
from rollout.workloads.test.config import QuarantineEntry


def quarantined(cases: Iterable[Case], entries: Sequence[QuarantineEntry], today: date) -> dict[str, str]:
    """By id: until when, and why."""
    valid = [entry for entry in entries if entry.until >= today]
    found: dict[str, str] = {}
    for case in cases:
        for entry in valid:
            if entry.id == case.id or fnmatchcase(case.id, entry.id.replace("[", "[[]")):
                found[case.id] = f"until {entry.until}" + (f": {entry.reason}" if entry.reason else "")
                break
    return found


def notes(cases: Sequence[Case], entries: Sequence[QuarantineEntry], today: date) -> list[str]:
    """What is to be done about the list."""
    over = [entry.id for entry in entries if entry.until < today]
    return [
        f"quarantine: the last day of {one} is past: its failure fails the run, and the entry can go" for one in over
    ]
