"""Backoff before a process that keeps ending is started again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """Pause of `first_s`, doubled with each consecutive failure up to `most_s`.

    A process that ran for more than `steady_s` is no failure: the next pause is `first_s` again. `failures` counts
    consecutive failures. `until` is the end of the last pause.
    """

    first_s: float
    most_s: float
    steady_s: float = float("inf")
    failures: int = 0
    until: float = 0.0

    def pause_s(self, lived_s: float = 0.0) -> float:
        """Return the pause before the next start after a failure."""
        if lived_s > self.steady_s:
            self.failures = 0
        pause = min(self.most_s, self.first_s * 2 ** min(self.failures, 60))
        self.failures += 1
        return pause

    def failed(self, now: float, *limits: float) -> float:
        """Return the pause that begins at `now`. `limits` are (first_s, most_s) of this kind of failure, if there are
        several."""
        if limits:
            self.first_s, self.most_s = limits
        pause = self.pause_s()
        self.until = now + pause
        return pause

    def reset(self) -> None:
        self.failures = 0
