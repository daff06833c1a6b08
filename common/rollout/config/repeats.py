"""Repeated messages of libraries: shown once, then counted."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable

WINDOW_S = 60.0
KEYS_MOST = 1000
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)


class Repeats(logging.Filter):
    """Passes a warning or error once, and a minute later reports how often it was repeated.

    asyncio alone reports a connection that it cannot accept a hundred times per turn, each with a traceback.
    """

    def __init__(
        self, window_s: float = WINDOW_S, later: Callable[[float, Callable[[], None]], None] | None = None
    ) -> None:
        super().__init__()
        self._window_s = window_s
        self._later = later or _after
        self._again: dict[tuple[str, str, str], int] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or getattr(record, "counted", False):
            return True
        error = record.exc_info[1] if record.exc_info else None
        # The text before its arguments are put in: they often differ (a port, a time), the fault does not.
        key = (record.name, str(record.msg), f"{type(error).__name__}: {error}" if error else "")
        with self._lock:
            if key in self._again:
                self._again[key] += 1
                return False
            if len(self._again) >= KEYS_MOST:
                return True
            self._again[key] = 0
        self._later(self._window_s, lambda: self._tell(key, record.levelno))
        if isinstance(error, OSError) and error.errno in _OUT_OF_FILES:
            # No line of a program is to blame, so no traceback.
            record.exc_info = None
            record.msg = (
                f"{record.msg}: {error.strerror}: all descriptors that this process may have are taken (`ulimit -n`); "
                "raise the limit, or find who opens so many connections"
            )
        return True

    def _tell(self, key: tuple[str, str, str], level: int) -> None:
        with self._lock:
            times = self._again.pop(key, 0)
        if times:
            name, text, error = key
            said = f"{text}: {error}" if error else text
            logging.getLogger(name).log(
                level, "%s ... and %d more in the last minute", said[:500], times, extra={"counted": True}
            )


def _after(seconds: float, work: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, work)
    timer.daemon = True
    timer.start()
