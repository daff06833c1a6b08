"""Lines of a process's output: as many as can be passed on, and a count of the rest."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod

from rollout.config.logging import redact_text

from rollout_worker.left_out import MARK, LeftOut

LINE_MAX = 8192
SECRET_MAX = 8192
"""Bytes of look-ahead beyond a cut line, so that a secret across the cut is masked as a whole."""
TELL_S = 1.0  # how much was dropped is told this often
LAST_WORDS = 4096
READ_BYTES = 64 << 10


class _Stream:
    """One stream. `part` is the start of a line or a mark. `left_out.inside` says that the rest of the current line is
    dropped."""

    __slots__ = ("left_out", "part")

    def __init__(self, left_out: LeftOut) -> None:
        self.part = b""
        self.left_out = left_out


class BoundedLines(ABC):
    """Streams of one process, by name. `now` returns monotonic seconds.

    After a silence, `burst_s` seconds' worth is passed on at once. Once lines are dropped, there must be room for
    `again` of such a burst before further lines are shown. A print of a gigabyte costs only reading it: what exceeds
    the rate is not decoded.
    """

    def __init__(
        self,
        now: float,
        *,
        bytes_a_second: float,
        lines_a_second: float,
        burst_s: float,
        again: float = 0.0,
        line_max: int = LINE_MAX,
    ) -> None:
        self._streams: dict[str, _Stream] = {}
        self._rates = bytes_a_second, lines_a_second
        self._burst_s = burst_s
        self._bytes, self._lines = burst_s * bytes_a_second, burst_s * lines_a_second
        self._again = again * self._bytes
        self._least = 0.0  # bytes that there has to be room for
        self._line_max = line_max
        self._at = now
        self._telling: asyncio.TimerHandle | None = None
        self.last_words = b""

    @abstractmethod
    def shown(self, stream: str, text: str, name: bytes) -> None:
        """Pass on a line; `name` is that of the last mark before it."""

    @abstractmethod
    def dropped(self, taken: list[tuple[int, int, int]]) -> None:
        """Report what was dropped since the last call (`LeftOut.take`)."""

    def named(self, name: bytes) -> bytes:
        """Return the text of a mark as it is passed on."""
        return name

    async def capture(self, stream: str, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(READ_BYTES):
            self.take(stream, data)

    def take(self, stream: str, data: bytes) -> None:
        """Feed data in an event loop, and report what was dropped."""
        self.feed(stream, data, time.monotonic())
        if self.untold and self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(TELL_S, self.tell)

    def feed(self, stream: str, data: bytes, now: float) -> None:
        self.last_words = (self.last_words + data[-LAST_WORDS:])[-LAST_WORDS:]
        self._refill(now)
        at = 0
        while at < len(data):
            if self._bytes <= self._least or self._lines <= 0:
                self._least = self._again
                self._drop(self._stream(stream), data[at:])
                break
            self._least = 0.0
            end = data.find(b"\n", at)
            self._part(stream, data[at:] if end < 0 else data[at:end], ended=end >= 0)
            at = len(data) if end < 0 else end + 1

    @property
    def untold(self) -> bool:
        """Whether dropped lines have not been reported by `tell`."""
        return any(stream.left_out.counts for stream in self._streams.values())

    def _stream(self, name: str) -> _Stream:
        if name not in self._streams:
            self._streams[name] = _Stream(LeftOut(self.named))
        return self._streams[name]

    def _refill(self, now: float) -> None:
        passed, self._at = now - self._at, now
        size, lines = self._rates
        self._bytes = min(self._burst_s * size, self._bytes + passed * size)
        self._lines = min(self._burst_s * lines, self._lines + passed * lines)

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
        if len(line) > self._line_max and (ended or len(line) > self._line_max + SECRET_MAX):
            shown = redact_text(line.decode(errors="replace"))[: self._line_max]
            self._line(name, f"{shown} (cut: too long for the log)")
            stream.left_out.inside = not ended
        elif ended:
            self._line(name, line.decode(errors="replace").rstrip(" \t\r\n"))
        else:
            stream.part = line

    @staticmethod
    def _drop(stream: _Stream, data: bytes) -> None:
        """Drop all data, including the current line."""
        stream.part = stream.left_out.drop(stream.part + data)

    def _line(self, stream: str, text: str) -> None:
        text, *marks = text.split(MARK.decode())
        left_out = self._stream(stream).left_out
        if text or not marks:
            self._lines -= 1
            if text:
                self.shown(stream, text, left_out.name)
        for name in marks:
            left_out.note(name.encode())

    def tell(self) -> None:
        """Report how much was dropped; call it within TELL_S."""
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        taken = [one for stream in self._streams.values() for one in stream.left_out.take()]
        if taken:
            self.dropped(taken)

    def close(self) -> None:
        """Handle the end of the process: an unterminated last line counts too."""
        for name, stream in self._streams.items():
            if stream.part:
                self._part(name, b"", ended=True)
        self.tell()


def lines_of(output: bytes) -> list[str]:
    """Return the lines that are not blank."""
    return [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]


def _still_shown(line: bytes) -> bytes:
    """Return what a terminal would show of the line: a progress bar overwrites itself with carriage returns."""
    return line[line.rstrip(b" \t\r").rfind(b"\r") + 1 :]
