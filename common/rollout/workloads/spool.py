"""Copies streams to files before anything is read: a pipe can be read once, but an input is read twice and again on
resume.

A stream is standard input, an open descriptor (a process substitution) or a FIFO. It is copied unchanged, made durable
and recorded in `streams.json`, atomically. When the same command resumes, the copy is the run's input: what the stream
brings this time, if anything, must be the same.
"""

from __future__ import annotations

import errno
import json
import os
import re
import select
import stat
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from rollout.model.errors import InputError
from rollout.workloads.output import disk_errors, write_atomically

Tell = Callable[[str], None]


def quiet(text: str) -> None:
    """A `Tell` that discards messages."""


"""Hears what goes on, several times a second; an empty text only asks whether to go on. It may raise, to stop."""

STDIN = "<stdin>"
_NAMED = {"-": 0, "/dev/stdin": 0, "/proc/self/fd/0": 0}
_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d{1,9})")
_RECORD = "streams.json"
_PIECE = 1 << 20
_POLL_MS = 200
_PATIENCE_S = 2.0


@dataclass(frozen=True, slots=True)
class Stream:
    """`name` is shown to users. `fd` is the descriptor of a stream that is already open, None for a FIFO at `name`."""

    name: str
    fd: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether this process has the descriptor, or the FIFO exists."""
        try:
            mode = self._status().st_mode
        except OSError:
            return False
        return self.fd is not None or stat.S_ISFIFO(mode)

    @property
    def key(self) -> tuple[int, int] | str:
        """A key that is equal for two names of one stream."""
        try:
            status = self._status()
        except OSError:
            return self.name
        return status.st_dev, status.st_ino

    def _status(self) -> os.stat_result:
        return Path(self.name).stat() if self.fd is None else os.fstat(self.fd)


def descriptor(name: str) -> Stream | None:
    """Return the stream of a name that stands for an open descriptor, or None if the name is a path."""
    if name in _NAMED:
        return Stream(STDIN, 0)
    found = _DESCRIPTOR.fullmatch(name)
    return Stream(name, int(found[1])) if found else None


@dataclass(frozen=True, slots=True)
class _Copy:
    path: Path
    bytes: int
    digest: str

    def is_whole(self) -> bool:
        digest = blake3()
        try:
            with self.path.open("rb") as file:
                while piece := file.read(_PIECE):
                    digest.update(piece)
        except OSError:
            return False
        return digest.hexdigest() == self.digest


class Spool:
    """The copies of a run's streams, in a directory of their own, created when needed.

    `resumed` means that the run is known, so existing copies are its input; otherwise they are replaced.
    """

    def __init__(self, directory: Path, *, resumed: bool, tell: Tell) -> None:
        self._directory = directory
        # Those of an earlier command that no run goes on from are of no use.
        self._known = _recorded(directory / _RECORD) if resumed else {}
        self._tell = tell
        self.notes: list[str] = []
        """Notes for the user about the origin of rows."""

    def has(self, stream: Stream) -> bool:
        """Return whether the run has a copy of `stream`."""
        return self._copy(stream) is not None

    def take(self, stream: Stream) -> Path:
        """Return a file with everything that `stream` brings or brought. Raises InputError or StorageError.
        Blocking."""
        copy = self._copy(stream)
        if copy is None:
            return self._record(stream)
        if not stream.is_open or (stream.fd is not None and os.isatty(stream.fd)):
            self.notes.append(f"{stream.name} is not read again: the run has its copy of it")
            return copy.path
        with _opened(stream) as fd:
            pieces = _pieces(stream, fd, self._tell, must_come=False)
            if not _compare(stream, pieces, copy.path):
                self.notes.append(f"nothing came from {stream.name}: the run goes on with its copy")
        return copy.path

    def _record(self, stream: Stream) -> Path:
        if not stream.is_open:
            raise InputError(f"cannot read {stream.name}: it is not open, so no rows can come from it")
        path = self._directory / f"{blake3(stream.name.encode()).hexdigest(8)}.stream"
        part, size, digest = path.with_suffix(".part"), 0, blake3()
        with disk_errors(part):
            self._directory.mkdir(parents=True, exist_ok=True)
        with _opened(stream) as fd, _writing(part) as write:
            for piece in _pieces(stream, fd, self._tell, must_come=True):
                write(piece)
                digest.update(piece)
                size += len(piece)
                self._tell(f"reading {stream.name}: {size >> 20} MiB")
        with disk_errors(path):
            part.replace(path)
        self._known[stream.name] = {"file": path.name, "bytes": size, "digest": digest.hexdigest()}
        write_atomically(self._directory / _RECORD, json.dumps(self._known).encode())
        return path

    def _copy(self, stream: Stream) -> _Copy | None:
        try:
            entry = self._known[stream.name]
            copy = _Copy(self._directory / Path(entry["file"]).name, int(entry["bytes"]), str(entry["digest"]))
        except (KeyError, TypeError, ValueError):
            return None
        return copy if copy.is_whole() else None


def _recorded(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}  # pyright: ignore[reportUnknownVariableType]


@contextmanager
def _opened(stream: Stream) -> Generator[int]:
    """Yield a descriptor to read. That of a FIFO does not wait for its writer; a shared one is left unchanged."""
    try:
        fd = os.dup(stream.fd) if stream.fd is not None else os.open(stream.name, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise InputError(f"cannot read {stream.name}: {error.strerror or error}") from error
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _writing(path: Path) -> Generator[Callable[[bytes], object]]:
    with disk_errors(path):
        file = path.open("wb")

    def write(piece: bytes) -> None:
        with disk_errors(path):
            file.write(piece)

    with file:
        yield write
        with disk_errors(path):
            file.flush()
            os.fsync(file.fileno())


def _pieces(stream: Stream, fd: int, tell: Tell, *, must_come: bool) -> Iterator[bytes]:
    """Yield what `stream` brings until its writers close it. Without `must_come`, a FIFO may lack a writer."""
    if stream.fd is None and not must_come:
        first = _read(stream, fd)
        if first == b"":
            return  # nobody has it open for writing
        if first:
            yield first
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    began, came = time.monotonic(), False
    while True:
        if not poll.poll(_POLL_MS):
            waited = time.monotonic() - began
            tell("" if came or waited < _PATIENCE_S else _waiting(stream, fd, must_come=must_come))
            continue
        piece = _read(stream, fd)
        if piece is None:
            continue
        if not piece:
            return
        came = True
        yield piece


def _read(stream: Stream, fd: int) -> bytes | None:
    """Return None if a writer has written nothing yet, and b"" at the end or without a writer."""
    try:
        return os.read(fd, _PIECE)
    except BlockingIOError:
        return None
    except OSError as error:
        what = "it is a directory" if error.errno == errno.EISDIR else error.strerror or str(error)
        raise InputError(f"cannot read {stream.name}: {what}") from error


def _waiting(stream: Stream, fd: int, *, must_come: bool) -> str:
    if stream.fd is None:
        return f"waiting for somebody to write to {stream.name}: it is a named pipe; Ctrl-C stops"
    if os.isatty(fd):
        return "waiting for rows from the terminal: Ctrl-D ends them, Ctrl-C stops"
    if must_come:
        return f"waiting for {stream.name}: nothing has come yet; Ctrl-C stops"
    return f"waiting for {stream.name}: the run has its copy, so close it (</dev/null) to go on without"


def _compare(stream: Stream, pieces: Iterator[bytes], copy: Path) -> bool:
    """Return whether anything came. Raises InputError if it differs from `copy`."""
    line, came = 1, False
    with copy.open("rb") as file:
        for piece in pieces:
            came = True
            before = file.read(len(piece))
            if piece != before:
                line += piece[: same_bytes(piece, before)].count(b"\n")
                raise _changed(stream, line, "is another than when the run was made")
            line += piece.count(b"\n")
        if came and file.read(1):
            raise _changed(stream, line, "is where it ends now; there were more when the run was made")
    return came


def same_bytes(one: bytes, other: bytes) -> int:
    """Return the length of the common prefix."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _changed(stream: Stream, line: int, what: str) -> InputError:
    return InputError(
        f"{stream.name}:{line}: this line {what}: give the same input again, or none at all to go on with the run's "
        "copy, or name another output directory to start a new run",
        file=stream.name,
        line=line,
    )
