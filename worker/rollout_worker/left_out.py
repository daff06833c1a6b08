"""Counts what is dropped of a process's output: lines and bytes, by the log whose items printed them.

A line counts once, where its first dropped part begins, though it continues in the next piece. Blank lines do not
count, because they are not shown either. Marks say whose lines follow, and are no lines themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

MARK = b"\x1e"
"""Start of a line of its own in the output.

`MARK log.seq.attempt` names the attempt that prints what follows, or none if empty; `MARK !log.lines.bytes` says how
much was left out here.
"""
NAME_MAX = 64


@dataclass(slots=True)
class LeftOut:
    """Counter of what is dropped. `named` reads marks. `inside` says that part of the line was already shown or
    counted. `name` is that of the last mark."""

    named: Callable[[bytes], bytes]
    inside: bool = False
    name: bytes = b""
    counts: dict[int, list[int]] = field(default_factory=dict[int, list[int]])

    def drop(self, data: bytes) -> bytes:
        """Count `data`, and return an incomplete mark at its end."""
        text, *marked = data.split(MARK)
        self._count(text)
        for n, segment in enumerate(marked, 1):
            name, newline, text = segment.partition(b"\n")
            self.inside = False
            if not newline and n == len(marked) and len(name) <= NAME_MAX:
                return MARK + name
            self.note(name)
            self._count(text)
        return b""

    def note(self, name: bytes) -> None:
        """Record the text of a mark."""
        if not name.startswith(b"!"):
            self.name = self.named(name)
            return
        try:
            log, lines, size = map(int, name[1:].split(b"."))
        except ValueError:
            return
        self.add(log, lines, size)

    def add(self, log: int, lines: int, size: int) -> None:
        count = self.counts.setdefault(log, [0, 0])
        count[0] += lines
        count[1] += size

    def take(self) -> list[tuple[int, int, int]]:
        """Return (log, lines, bytes) counted since the last call; log 0 means unknown."""
        taken = [(log, lines, size) for log, (lines, size) in self.counts.items()]
        self.counts.clear()
        return taken

    def _count(self, text: bytes) -> None:
        if not text:
            return
        pieces = text.split(b"\n")
        lines = sum(map(bool, map(bytes.strip, pieces)))
        if self.inside and pieces[0].strip():
            lines -= 1
        self.inside = bool(pieces[-1].strip()) or (self.inside and len(pieces) == 1)
        log = self.name.partition(b".")[0]
        self.add(int(log) if log.isdigit() else 0, lines, len(text))


def marks(taken: list[tuple[int, int, int]]) -> bytes:
    """Return the lines that report the count to the next reader of the output."""
    return b"".join(MARK + b"!%d.%d.%d\n" % one for one in taken)
