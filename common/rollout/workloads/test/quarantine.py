"""Tests that may fail until a given day."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date
from fnmatch import fnmatchcase

from rollout.workloads.test.config import QuarantineEntry


def quarantined(ids: Iterable[str], entries: Sequence[QuarantineEntry], today: date) -> dict[str, str]:
    """Return the day and the reason, by id of a test or of a file that cannot be collected."""
    valid = [entry for entry in entries if entry.until >= today]
    found: dict[str, str] = {}
    for id in ids:
        for entry in valid:
            if _matches(entry, id):
                found[id] = f"until {entry.until}" + (f": {entry.reason}" if entry.reason else "")
                break
    return found


def _matches(entry: QuarantineEntry, id: str) -> bool:
    return entry.id == id or fnmatchcase(id, entry.id.replace("[", "[[]").replace("?", "[?]"))


def notes(ids: Sequence[str], entries: Sequence[QuarantineEntry], today: date, *, all_tests: bool) -> list[str]:
    """Return advice on the list. `all_tests` means that `ids` are those of all tests."""
    over = [entry.id for entry in entries if entry.until < today]
    lost = [entry.id for entry in entries if all_tests and not any(_matches(entry, id) for id in ids)]
    past = "is past: its failure fails the run, and the entry can go"
    return [
        *(f"quarantine: the last day of {one} {past}" for one in over),
        *(f"quarantine: no test has the id {one}" for one in lost),
    ]
