"""Why items of a run failed, counted for people as it happens: nobody has to ask the ledger when the run ends.

In memory only, so a leader counts those that it saw itself.
"""

from __future__ import annotations

import re
from typing import Any

from rollout.model.item import Failure, Outcome

from rollout_coordinator.core.step import ResultRows

KINDS_MAX = 20
LENGTH = 120
_VARIES = re.compile(r"0x[0-9a-f]+|[0-9A-HJKMNP-TV-Z]{26}|\d+", re.IGNORECASE)
"""What differs between two tellings of one thing: addresses, ids, numbers of processes, bytes that are free."""


def alike(text: str) -> str:
    """Equal where two texts tell of the same."""
    return _VARIES.sub("#", text)


def first_line(text: str) -> str:
    """The first that is not blank; empty: there is none."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


class Reasons:
    """Counts of reasons that are alike but for their numbers and ids, the first of each in its words."""

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
        """Fields of an event, of `failed` items: the most common reason, or one of several where not all are known."""
        if not failed or not self._kinds:
            return {}
        count, said = max(self._kinds.values(), key=lambda kind: kind[0])
        if 2 * count > failed or sum(kind[0] for kind in self._kinds.values()) == failed:
            return {"most_common": said, "most_common_count": count}
        return {"such_as": said}
