"""What a child process prints, as lines of the daemon's log: as much as a log can take, and a count of the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Protocol, cast

from rollout.config.sentences import sentence_of

from rollout_worker.attempts import AttemptKey

LINE_MAX = 8192
BYTES_A_SECOND = 64 << 10
LINES_A_SECOND = 200
BURST_S = 5.0
"""So many seconds' worth at once, after a silence: a traceback, or what a library says while it loads."""
TELL_S = 1.0  # how much was dropped is told this often
LAST_WORDS = 4096
_NAME = re.compile(r"([0-9]{1,18})\.([0-9]{1,18})\.([0-9]{1,9})")
_LEVELS = frozenset({"debug", "info", "warning", "error", "critical"})
_LOGGERS_OWN = frozenset({"self", "method_name", "event", "timestamp", "child", "pid", "exc_info", "stack_info"})

Emit = Callable[[str, str, dict[str, Any]], None]
"""(level, event, fields)"""
Printed = Callable[[str, str, AttemptKey | None], None]
"""(stream, line, the attempt that printed it, where it is known)"""
MARK = "\x1e"
"""A child says whose what follows is, in a line `MARK log.seq.attempt`; with nothing behind it: nobody's."""
LeftOut = Callable[[int, int], None]
"""(lines, bytes)"""


class Shipper(Protocol):
    """Takes what was printed to the run that it belongs to."""

    def add(self, run_id: str, executor: str, stream: str, text: str, key: AttemptKey | None) -> None: ...
    def left_out(self, run_id: str, executor: str, lines: int, size: int) -> None: ...


class Output:
    """Both streams of one process. JSON lines with an `event` keep their level and fields. `now`: monotonic seconds.

    A print of a gigabyte costs the daemon reading it, and no more: what is over the rate is not even decoded.
    """

    def __init__(
        self,
        emit: Emit,
        now: float,
        printed: Printed = lambda stream, line, key: None,
        left_out: LeftOut = lambda lines, size: None,
    ) -> None:
        self._emit = emit
        self._printed = printed
        self._left_out = left_out
        self._keys: dict[str, AttemptKey] = {}  # by stream: whose it is
        self._bytes = BURST_S * BYTES_A_SECOND
        self._lines = BURST_S * LINES_A_SECOND
        self._at = now
        self._parts: dict[str, bytes] = {}  # by stream: the beginning of a line
        self._skipping: set[str] = set()  # streams in the middle of a line that is dropped
        self._dropped_lines = self._dropped_bytes = 0
        self.last_words = b""

    def feed(self, stream: str, data: bytes, now: float) -> None:
        self.last_words = (self.last_words + data[-LAST_WORDS:])[-LAST_WORDS:]
        self._refill(now)
        rest = data
        while rest:
            if self._bytes <= 0 or self._lines <= 0:
                self._drop(stream, rest)
                break
            line, end, rest = rest.partition(b"\n")
            self._part(stream, line, ended=bool(end))

    @property
    def untold(self) -> bool:
        """Whether something was dropped that `tell` is still to say."""
        return self._dropped_bytes > 0

    def _refill(self, now: float) -> None:
        passed, self._at = now - self._at, now
        self._bytes = min(BURST_S * BYTES_A_SECOND, self._bytes + passed * BYTES_A_SECOND)
        self._lines = min(BURST_S * LINES_A_SECOND, self._lines + passed * LINES_A_SECOND)

    def _part(self, stream: str, part: bytes, *, ended: bool) -> None:
        if stream in self._skipping:
            self._dropped_bytes += len(part)
            if ended:
                self._skipping.discard(stream)
                self._dropped_lines += 1
            return
        line = _still_shown(self._parts.pop(stream, b"") + part)
        self._bytes -= len(part) + ended
        if len(line) > LINE_MAX:
            self._line(stream, line[:LINE_MAX].decode(errors="replace") + " (cut: too long for the log)")
            if not ended:
                self._skipping.add(stream)
        elif ended:
            self._line(stream, line.decode(errors="replace").rstrip(" \t\r\n"))
        else:
            self._parts[stream] = line

    def _drop(self, stream: str, data: bytes) -> None:
        """All of it, the line in hand and the line it ends in the middle of included."""
        self._dropped_bytes += len(self._parts.pop(stream, b"")) + len(data)
        self._dropped_lines += data.count(b"\n")
        self._skipping.discard(stream)
        self._keys.pop(stream, None)
        if not data.endswith(b"\n"):
            self._skipping.add(stream)

    def _line(self, stream: str, text: str) -> None:
        text, *marks = text.split(MARK)
        if marks:
            self._line(stream, text) if text else None
            self._mark(stream, marks[-1])
            return
        self._lines -= 1
        key = self._keys.get(stream)
        if text.startswith("{"):
            try:
                entry: Any = json.loads(text)
                event, level = str(entry.pop("event")), str(entry.pop("level", "info"))
            except (ValueError, KeyError, RecursionError):
                pass
            else:
                # Not `child` and `pid`, which are of this one, nor what means something to the logger itself.
                fields = {k: v for k, v in cast("dict[str, Any]", entry).items() if k not in _LOGGERS_OWN}
                self._emit(level if level in _LEVELS else "info", event, fields)
                said = sentence_of(event, fields) or " ".join([event, *map(_pair, fields.items())])
                self._printed(stream, said, key)
                return
        if text:
            self._printed(stream, text, key)
            self._emit("info", "child_output", {"text": text})

    def _mark(self, stream: str, name: str) -> None:
        found = _NAME.fullmatch(name)
        if found is None:
            self._keys.pop(stream, None)
        else:
            log, seq, attempt = map(int, found.groups())
            self._keys[stream] = AttemptKey(log, seq, attempt)

    def tell(self) -> None:
        """How much was dropped; to be called within TELL_S of its having been."""
        if self.untold:
            fields = {"lines": self._dropped_lines, "bytes": self._dropped_bytes}
            self._emit("warning", "child_output_dropped", fields)
            self._left_out(self._dropped_lines, self._dropped_bytes)
            self._dropped_lines = self._dropped_bytes = 0

    def close(self) -> None:
        """The process has ended: what it did not end with a newline is a line too."""
        for stream in list(self._parts):
            self._part(stream, b"", ended=True)
        self.tell()


def _still_shown(line: bytes) -> bytes:
    """What a terminal would show of it: a progress bar writes over itself, with carriage returns."""
    return line[line.rstrip(b" \t\r").rfind(b"\r") + 1 :]


def _pair(field: tuple[str, Any]) -> str:
    return f"{field[0]}={field[1]}"
