"""What a child process prints, as lines of the daemon's log: as much as a log can take, and a count of the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Protocol, cast

from rollout.config.logging import redact_text
from rollout.config.sentences import sentence_of

from rollout_worker.attempts import AttemptKey
from rollout_worker.left_out import MARK, LeftOut

LINE_MAX = 8192
SECRET_MAX = 8192
"""A line is cut when so much more of it is there: a secret that the cut goes through is masked whole before."""
BYTES_A_SECOND = 64 << 10
LINES_A_SECOND = 200
BURST_S = 5.0
"""So many seconds' worth at once, after a silence: a traceback, or what a library says while it loads."""
TELL_S = 1.0  # how much was dropped is told this often
LAST_WORDS = 4096
_NAME = re.compile(rb"([0-9]{1,18})\.([0-9]{1,18})\.([0-9]{1,9})")
_LEVELS = frozenset({"debug", "info", "warning", "error", "critical"})
_LOGGERS_OWN = frozenset({"self", "method_name", "event", "timestamp", "child", "pid", "exc_info", "stack_info"})

Emit = Callable[[str, str, dict[str, Any]], None]
"""(level, event, fields)"""
Printed = Callable[[str, str, AttemptKey | None], None]
"""(stream, line, the attempt that printed it, where it is known)"""
Missing = Callable[[int, int, int], None]
"""(log of the items that printed it, 0: not known; lines, bytes)"""


class Shipper(Protocol):
    """Takes what was printed to the run that it belongs to."""

    def add(self, run_id: str, executor: str, stream: str, text: str, key: AttemptKey | None) -> None: ...
    def left_out(self, run_id: str, executor: str, lines: int, size: int) -> None: ...


class _Stream:
    """`part`: the beginning of a line, or of a mark. `left_out.inside`: the rest of the line in hand is dropped too."""

    __slots__ = ("key", "left_out", "part")

    def __init__(self) -> None:
        self.part = b""
        self.key: AttemptKey | None = None  # whose it is
        self.left_out = LeftOut()


class Output:
    """Both streams of one process. JSON lines with an `event` keep their level and fields. `now`: monotonic seconds.

    A print of a gigabyte costs the daemon reading it, and no more: what is over the rate is not even decoded.
    """

    def __init__(
        self,
        emit: Emit,
        now: float,
        printed: Printed = lambda stream, line, key: None,
        missing: Missing = lambda log, lines, size: None,
    ) -> None:
        self._emit = emit
        self._printed = printed
        self._missing = missing
        self._streams: dict[str, _Stream] = {}
        self._bytes = BURST_S * BYTES_A_SECOND
        self._lines = BURST_S * LINES_A_SECOND
        self._at = now
        self.last_words = b""

    def feed(self, stream: str, data: bytes, now: float) -> None:
        self.last_words = (self.last_words + data[-LAST_WORDS:])[-LAST_WORDS:]
        self._refill(now)
        rest = data
        while rest:
            if self._bytes <= 0 or self._lines <= 0:
                self._drop(self._stream(stream), rest)
                break
            line, end, rest = rest.partition(b"\n")
            self._part(stream, line, ended=bool(end))

    @property
    def untold(self) -> bool:
        """Whether something was dropped that `tell` is still to say."""
        return any(stream.left_out.counts for stream in self._streams.values())

    def _stream(self, name: str) -> _Stream:
        return self._streams.setdefault(name, _Stream())

    def _refill(self, now: float) -> None:
        passed, self._at = now - self._at, now
        self._bytes = min(BURST_S * BYTES_A_SECOND, self._bytes + passed * BYTES_A_SECOND)
        self._lines = min(BURST_S * LINES_A_SECOND, self._lines + passed * LINES_A_SECOND)

    def _part(self, name: str, part: bytes, *, ended: bool) -> None:
        stream = self._stream(name)
        if stream.left_out.inside:
            rest, mark, part = part.partition(MARK)
            stream.left_out.drop(rest + b"\n" if mark or ended else rest)
            if not mark:
                return
            part = MARK + part
        line = _still_shown(stream.part + part)
        stream.part = b""
        self._bytes -= len(part) + ended
        if len(line) > LINE_MAX and (ended or len(line) > LINE_MAX + SECRET_MAX):
            shown = redact_text(line.decode(errors="replace"))[:LINE_MAX]
            self._line(name, f"{shown} (cut: too long for the log)")
            stream.left_out.inside = not ended
        elif ended:
            self._line(name, line.decode(errors="replace").rstrip(" \t\r\n"))
        else:
            stream.part = line

    @staticmethod
    def _drop(stream: _Stream, data: bytes) -> None:
        """All of it, the line in hand included."""
        stream.part = stream.left_out.drop(stream.part + data)
        stream.key = _key(stream.left_out.name)

    def _line(self, stream: str, text: str) -> None:
        text, *marks = text.split(MARK.decode())
        if marks:
            self._line(stream, text) if text else None
            for name in marks:
                self._mark(self._stream(stream), name.encode())
            return
        self._lines -= 1
        key = self._stream(stream).key
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

    @staticmethod
    def _mark(stream: _Stream, name: bytes) -> None:
        stream.left_out.note(name)
        stream.key = _key(stream.left_out.name)

    def tell(self) -> None:
        """How much was dropped; to be called within TELL_S of its having been."""
        taken = [one for stream in self._streams.values() for one in stream.left_out.take()]
        if taken:
            fields = {"lines": sum(lines for _, lines, _ in taken), "bytes": sum(size for *_, size in taken)}
            self._emit("warning", "child_output_dropped", fields)
        for log, lines, size in taken:
            self._missing(log, lines, size)

    def close(self) -> None:
        """The process has ended: what it did not end with a newline is a line too."""
        for name, stream in self._streams.items():
            if stream.part:
                self._part(name, b"", ended=True)
        self.tell()


def _key(name: bytes) -> AttemptKey | None:
    found = _NAME.fullmatch(name)
    return AttemptKey(*map(int, found.groups())) if found is not None else None


def _still_shown(line: bytes) -> bytes:
    """What a terminal would show of it: a progress bar writes over itself, with carriage returns."""
    return line[line.rstrip(b" \t\r").rfind(b"\r") + 1 :]


def _pair(field: tuple[str, Any]) -> str:
    return f"{field[0]}={field[1]}"
