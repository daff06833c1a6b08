"""Waits of a command that take longer than two seconds: reported, and again at growing intervals."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rollout.config.pace import STILL_FACTOR, STILL_FIRST_S, STILL_MAX_S
from rollout.model.errors import RolloutError

TELL_AFTER_S = 2.0
_SHORT_S = 60.0
"""Patience in seconds above which no end is announced: such a command means to outlive a repair."""
_GAP_S = 15.0
"""Seconds between two failures above which they are separate: something was answered between them."""


class Waits:
    """Reports a connection's trouble; pass `trouble` and `answered` as its `on_trouble` and `on_answer`.

    Used as a context manager, it says nothing after its end. `asked` names the peer and is printed before the first
    trouble; `on_answer` is called with the first answer.
    """

    def __init__(
        self,
        tell: Callable[[str], None],
        asked: str = "",
        on_answer: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tell = tell
        self._asked = asked
        self._on_answer = on_answer
        self._clock = clock
        self._since = 0.0
        self._heard_at = float("-inf")
        self._tell_at = TELL_AFTER_S
        self._pause = STILL_FIRST_S
        self._told = False
        self._over = False

    def trouble(self, error: RolloutError | None, seconds: float) -> None:
        """Report that `error` has lasted for `seconds` of this call, plus preceding failed calls. None means it is
        over."""
        if self._over:
            return
        now = self._clock()
        if now - self._heard_at > _GAP_S:
            self._begin(now - seconds)
        self._heard_at = now
        of_call, seconds = seconds, max(seconds, now - self._since)
        if error is None:
            if self._told:
                again = " again" if self._on_answer is None else ""
                self._tell(f"the cluster answers{again}, after {seconds:.0f} s")
            self._heard_at = float("-inf")
        elif seconds >= self._tell_at:
            still = f"still, for {seconds:.0f} s: " if self._told else ""
            if self._asked:
                self._tell(f"asking {self._asked}")
                self._asked = ""
            goes_on = _goes_on(error, of_call)
            self._tell(f"{still}{error.message.splitlines()[0][:500]}; {goes_on}")
            self._told = True
            self._tell_at = seconds + self._pause
            self._pause = min(self._pause * STILL_FACTOR, STILL_MAX_S)

    def answered(self) -> None:
        if self._on_answer is not None and not self._over:
            self._on_answer()
        self._asked, self._on_answer = "", None

    def _begin(self, since: float) -> None:
        self._since = since
        self._told, self._tell_at, self._pause = False, TELL_AFTER_S, STILL_FIRST_S

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over = True


def _goes_on(error: RolloutError, seconds: float) -> str:
    if "tries_s" not in error.context:
        return "waiting"
    tries_s = float(error.context["tries_s"])
    return f"trying again for {tries_s - seconds:.0f} s" if seconds < tries_s <= _SHORT_S else "trying again"
