"""How far a batch is, as its attempt tells of itself in a line, and the client shows it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE = re.compile(r"(\d{1,9})/(\d{1,9}) tests, (\d{1,9}) s: (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """`done` of `count` tests are over; `id` has been running for `seconds`; empty: none runs."""

    done: int
    count: int
    id: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.done}/{self.count} tests, {self.seconds:.0f} s: {self.id}"

    @classmethod
    def parse(cls, note: str) -> BatchProgress | None:
        """None: the note says something else."""
        found = _LINE.fullmatch(note)
        return cls(int(found[1]), int(found[2]), found[4], float(found[3])) if found else None
