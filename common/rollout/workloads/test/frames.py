"""The two streams of a test process: what tests print, interspersed with frames of `pytest_runner.py`."""

from __future__ import annotations

from collections.abc import Callable

from rollout.workloads.test.cases import OUTPUT_MAX

MARK = b"\x1e"
_MORE, _LAST = b"+", b"."
_SIZE = 4
EVENT_MAX = 4 << 20
"""Maximum size of an event in bytes; ours are smaller."""


class Splitter:
    """Splits a stream, fed in arbitrary pieces, into text and whole events, in order."""

    def __init__(self, token: str, on_text: Callable[[bytes], None], on_event: Callable[[bytes], None]) -> None:
        self._head = MARK + token.encode()
        self._on_text = on_text
        self._on_event = on_event
        self._rest = b""
        self._event = bytearray()

    def feed(self, data: bytes) -> None:
        data, at = self._rest + data, 0
        while True:
            found = data.find(self._head, at)
            if found < 0:
                begun = _begun(data, self._head, at)
                self._text(data[at:begun])
                self._rest = data[begun:]
                return
            kind = found + len(self._head)
            body = kind + 1 + _SIZE
            if len(data) < body:
                self._text(data[at:found])
                self._rest = data[found:]
                return
            size = _size(data[kind:body])
            if size < 0:  # a test printed what looks like a frame
                self._text(data[at:body])
                at = body
                continue
            if len(data) < body + size:
                self._text(data[at:found])
                self._rest = data[found:]
                return
            self._text(data[at:found])
            self._event += data[body : body + size]
            at = body + size
            if data[kind : kind + 1] == _LAST:
                event, self._event = bytes(self._event), bytearray()
                self._on_event(event)
            elif len(self._event) > EVENT_MAX:
                self._event.clear()

    def end(self) -> None:
        """End the stream: the rest is text."""
        self._text(self._rest)
        self._rest = b""

    def _text(self, data: bytes) -> None:
        if data:
            self._on_text(data)


def _begun(data: bytes, head: bytes, at: int) -> int:
    """Return where an incomplete frame may begin, or the end of `data`."""
    last = data.rfind(MARK, max(at, len(data) - len(head) + 1))
    return last if last >= 0 and head.startswith(data[last:]) else len(data)


def _size(field: bytes) -> int:
    """Return the size, or a negative number if the field is not one."""
    if field[:1] not in (_MORE, _LAST):
        return -1
    try:
        return int(field[1:].decode("ascii"), 16)
    except ValueError:
        return -1


class Kept:
    """Keeps the first and the last half of OUTPUT_MAX bytes of a test's output."""

    _HALF = OUTPUT_MAX // 2

    def __init__(self) -> None:
        self._first = bytearray()
        self._last = bytearray()
        self._dropped = 0

    def add(self, data: bytes) -> None:
        room = self._HALF - len(self._first)
        if room > 0:
            self._first += data[:room]
            data = data[room:]
        if data:
            self._last += data[-self._HALF :]
            over = max(0, len(self._last) - self._HALF)
            self._dropped += max(0, len(data) - self._HALF) + over
            del self._last[:over]

    def text(self) -> str:
        dropped = f"\n[... {self._dropped} bytes left out ...]\n".encode() if self._dropped else b""
        text = bytes(self._first) + dropped + bytes(self._last)
        return text.decode("utf-8", "replace")
