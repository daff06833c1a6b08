"""The output of a command: all of it if it is short, else its head and tail, and a file that has the middle too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path

FILE_BYTES = 1 << 30
"""Most bytes of one stream in its file. Later output only moves the tail."""


@dataclass(frozen=True, slots=True)
class Output:
    """An output stream. If `size` is at most twice the kept bytes, `head + tail` is all of it and there is no file."""

    head: bytes
    tail: bytes
    size: int  # bytes that were printed
    file: Path | None = None
    in_file: int = 0  # bytes of the stream's beginning that the file holds

    @property
    def missing(self) -> int:
        """Number of bytes between head and tail."""
        return self.size - len(self.head) - len(self.tail)

    def text(self) -> str:
        """Decode as UTF-8 for display, with a mark where bytes are missing and U+FFFD for invalid bytes."""
        if not self.missing:
            return (self.head + self.tail).decode(errors="replace")
        where = f", see {self.file}" if self.file else ""
        mark = f"\n[... {self.missing} bytes left out{where} ...]\n"
        return self.head.decode(errors="replace") + mark + self.tail.decode(errors="replace")


class Capture:
    """Collects one stream in bounded memory. `path` is called only if the stream is long."""

    def __init__(self, keep: int, path: Callable[[], Path], file_bytes: int = FILE_BYTES) -> None:
        self._keep = keep
        self._path = path
        self._file_bytes = file_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self._size = 0
        self._file: BufferedWriter | None = None
        self._name: Path | None = None
        self._in_file = 0

    def feed(self, data: bytes) -> None:
        if self._file is None and self._name is None and self._size + len(data) > 2 * self._keep:
            self._name = self._path()
            self._file = self._name.open("wb")
            self._store(bytes(self._head + self._tail))
        self._store(data)
        self._size += len(data)
        room = self._keep - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        # Cut seldom, not at each piece: the tail is moved once for each `keep` bytes.
        if len(self._tail) > 2 * self._keep:
            del self._tail[: len(self._tail) - self._keep]

    def _store(self, data: bytes) -> None:
        if self._file is None or self._in_file >= self._file_bytes:
            return
        try:
            self._in_file += self._file.write(data[: self._file_bytes - self._in_file])
        except OSError:  # the disk is full: `in_file` records how much was written, and the command goes on
            self._file_bytes = self._in_file

    def close(self) -> Output:
        if self._file is not None:
            self._file.close()
            self._file = None
        tail = bytes(self._tail[-self._keep :]) if self._keep else b""
        return Output(bytes(self._head), tail, self._size, self._name, self._in_file)
