"""How long a process that keeps ending is left before it is started again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """`first_s`, doubled with each failure in a row, at most `most_s`. A process that ran for more than `steady_s` was
    no failure: the next pause is `first_s` again. `failures`: in a row. `until`: when the last pause is over."""

    first_s: float
    most_s: float
    steady_s: float = float("inf")
    failures: int = 0
    until: float = 0.0

    def pause_s(self, lived_s: float = 0.0) -> float:
        """Before the next start, after a failure."""
        if lived_s > self.steady_s:
            self.failures = 0
        pause = min(self.most_s, self.first_s * 2 ** min(self.failures, 60))
        self.failures += 1
        return pause

    def failed(self, now: float, *limits: float) -> float:
        """`pause_s`, beginning `now`. `limits`: (first_s, most_s) of this kind of failure, where there are several."""
        if limits:
            self.first_s, self.most_s = limits
        pause = self.pause_s()
        self.until = now + pause
        return pause

    def reset(self) -> None:
        self.failures = 0
