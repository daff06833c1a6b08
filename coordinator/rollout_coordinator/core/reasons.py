"""Reasons why items of a run failed, counted as it happens, so that nothing queries the ledger when the run ends.

They are in memory only, so a leader counts those that it saw itself.
"""

from __future__ import annotations

import re
from typing import Any

from rollout.model.item import Failure, Outcome

from rollout_coordinator.core.step import ResultRows

KINDS_MAX = 20
LENGTH = 120
_VARIES = re.compile(r"0x[0-9a-f]+|[0-9A-HJKMNP-TV-Z]{26}|\d+", re.IGNORECASE)
"""Pattern of what differs between two reports of one thing: addresses, ids, process numbers, free bytes."""


def alike(text: str) -> str:
    """Return a key that is equal for two reports of the same thing."""
    return _VARIES.sub("#", text)


def first_line(text: str) -> str:
    """Return the first line that is not blank, or an empty string."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


class Reasons:
    """Counts of reasons that differ only in numbers and ids, with the text of the first of each."""

    __slots__ = ("_kinds",)

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[int, str]] = {}  # kind -> (count, the first in its words)

    def add(self, rows: ResultRows) -> None:
        for index, failure in rows.failures.items():
            if rows.outcome[index] is Outcome.FAILED:
                self._add(failure)

    def _add(self, failure: Failure) -> None:
        said = first_line(failure.message[: 4 * LENGTH]) or failure.code
        said = said if len(said) <= LENGTH else f"{said[: LENGTH - 1]}…"
        kind = alike(f"{failure.code} {said}")
        if kind in self._kinds or len(self._kinds) < KINDS_MAX:
            count, first = self._kinds.get(kind, (0, said))
            self._kinds[kind] = count + 1, first

    def told(self, failed: int) -> dict[str, Any]:
        """Return the fields of an event about `failed` items: the most common reason, or one of several if not all are
        known."""
        if not failed or not self._kinds:
            return {}
        count, said = max(self._kinds.values(), key=lambda kind: kind[0])
        if 2 * count > failed or sum(kind[0] for kind in self._kinds.values()) == failed:
            return {"most_common": said, "most_common_count": count}
        return {"such_as": said}
