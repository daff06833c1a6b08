"""Chooses the items to trace and their trace and span ids: pure functions of the run id, log, seq and attempt.

Client, coordinator and worker therefore agree without communication, and a coordinator that takes over continues the
traces of its predecessor.
"""

from __future__ import annotations

from blake3 import blake3

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: its multiples modulo 2^64 are spread evenly (Knuth, TAOCP vol. 3, section 6.4)."""


class LogTraces:
    """Traces of a log's items. `ratio` is the traced share, from 0 to 1; a larger ratio traces all items of a smaller
    one and more."""

    __slots__ = ("_bound", "_name", "_offset", "log", "run_id")

    def __init__(self, run_id: str, log: int, ratio: float) -> None:
        self.run_id = run_id
        self.log = log
        self._name = f"{run_id}/{log}"
        self._offset = _number(self._name, 8)
        self._bound = round(ratio * (MASK + 1))

    def is_sampled(self, seq: int) -> bool:
        return (seq * GOLDEN + self._offset) & MASK < self._bound

    def trace_id(self, seq: int) -> int:
        """Return the trace id: 16 bytes, as a number."""
        return _number(f"{self._name}/{seq}", 16)

    def span_id(self, seq: int, name: str, attempt: int) -> int:
        """Return the span id: 8 bytes, as a number."""
        return _number(f"{self._name}/{seq}/{name}/{attempt}", 8)


def _number(text: str, size: int) -> int:
    return int.from_bytes(blake3(text.encode()).digest(length=size), "big") or 1  # 0 is no valid id
