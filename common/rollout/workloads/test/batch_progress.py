"""The progress of a batch, which its attempt reports in a line of text and the client displays."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE = re.compile(r"(\d{1,9})/(\d{1,9}) tests, (\d{1,9}) s: (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """`done` of `count` tests have ended. The test `id` has been running for `seconds`; it is empty if none runs."""

    done: int
    count: int
    id: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.done}/{self.count} tests, {self.seconds:.0f} s: {self.id}"

    @classmethod
    def parse(cls, note: str) -> BatchProgress | None:
        """Parse a note. Returns None if it is not about progress."""
        found = _LINE.fullmatch(note)
        return cls(int(found[1]), int(found[2]), found[4], float(found[3])) if found else None
