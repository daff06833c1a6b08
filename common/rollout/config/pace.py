"""Pace of messages about a lasting condition: at once, then at growing intervals."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

STILL_FIRST_S, STILL_FACTOR, STILL_MAX_S = 20.0, 3.0, 900.0
"""First repetition in seconds, growth factor, and longest interval (a quarter of an hour)."""
FORGET_S = 120.0
"""Seconds of silence after which the same condition counts as new."""
KNOWN_MAX = 500


@dataclass(slots=True)
class _Trouble:
    began: float
    last: float
    tell_at: float
    pause: float
    times: int = 1


class Pace:
    """Decides when a lasting condition is reported. `key` identifies the condition."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[str, _Trouble] = OrderedDict()

    def tell(self, key: str) -> tuple[float, int] | None:
        """Return (seconds it has lasted, number of occurrences), (0, 1) for a new one, or None if nothing is to be
        reported now."""
        now = self._clock()
        trouble = self._known.get(key)
        if trouble is None or now - trouble.last > max(FORGET_S, 2 * trouble.pause):
            self._known[key] = _Trouble(now, now, now + STILL_FIRST_S, STILL_FIRST_S)
            self._known.move_to_end(key)
            while len(self._known) > KNOWN_MAX:
                self._known.popitem(last=False)
            return 0.0, 1
        trouble.last = now
        trouble.times += 1
        if now < trouble.tell_at:
            return None
        trouble.pause = min(trouble.pause * STILL_FACTOR, STILL_MAX_S)
        trouble.tell_at = now + trouble.pause
        return now - trouble.began, trouble.times

    def end(self, prefix: str) -> float | None:
        """End the conditions whose keys begin with `prefix`; return the seconds they lasted, or None if there was
        none."""
        keys = [key for key in self._known if key.startswith(prefix)]
        now = self._clock()
        return max((now - self._known.pop(key).began for key in keys), default=None)
