"""Rows of input files: the representation of a row, and the lines of text files, compressed or not."""

from __future__ import annotations

import gzip
import io
import os
import stat
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

from backports.zstd import ZstdError, ZstdFile

from rollout.model.errors import InputError
from rollout.workloads.input_files import InputFile
from rollout.workloads.json_form import parse_json

MAX_LINE = 64 << 20
"""Maximum bytes of a line, or of a row of a table as JSON."""

_BOM = b"\xef\xbb\xbf"
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_FOREIGN = {
    b"\xff\xfe": "UTF-16: convert it to UTF-8",
    b"\xfe\xff": "UTF-16: convert it to UTF-8",
    b"PK\x03\x04": "a zip archive, such as an Excel workbook: unpack it, or export it as CSV",
    b"PAR1": 'a parquet file: name it .parquet, or set format = "parquet"',
    b"version https://git-lfs": "a pointer of Git LFS and not the file itself: run git lfs pull",
}
"""What files other than text turn out to be, by their first bytes."""
UNREAD: Final[Any] = object()
"""The value of a line whose JSON was not parsed yet."""


@dataclass(slots=True)
class Line:
    """A row: a line that is not blank, without its end, or a row of a table as a line of JSON.

    `index` counts all rows from 0. `line` is its number in the file from 1, or its row in a parquet file or dataset.
    `fault` is what its reader or the check found wrong; `repeats` means that it has the id of another row. `value` is
    that of a row that was not JSON before, equal to `raw`. `whole` means that its line has its end.
    """

    index: int
    file: str
    line: int
    raw: bytes
    fault: str = ""
    repeats: bool = False
    value: Any = field(default=UNREAD, compare=False, repr=False)
    whole: bool = field(default=True, compare=False)

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"


def json_of(line: Line) -> Any:
    """Return the JSON value of a line, of any type. Raises InputError with file and line."""
    if line.value is not UNREAD:
        return line.value
    try:
        return parse_json(line.raw)
    except ValueError as error:
        fail(line.file, line.line, str(error))


def fail(file: str, line: int, message: str) -> NoReturn:
    """Raise the InputError of a line: `file:line: message`."""
    raise InputError(f"{file}:{line}: {message}", file=file, line=line)


def lines_of(file: InputFile, first: int = 0) -> Iterator[Line]:
    """Yield lines that are not blank, decompressed; `first` is the index of the first. Raises InputError."""
    number, index = 0, first
    with unpacked(file) as stream:
        while raw := read_line(file, stream, number + 1):
            number += 1
            line = raw.strip()
            if index == first and line.startswith(b"[") and Path(file.name).suffix == ".json":
                fail(file.name, number, "a JSON array, and rows are one object a line: convert it with jq -c '.[]'")
            if line:
                yield Line(index, file.name, number, line, whole=raw.endswith(b"\n"))
                index += 1


def read_line(file: InputFile, stream: io.BufferedIOBase, number: int) -> bytes:
    """Return the line `number` of `stream`, with its end and without a BOM; empty at the end of the file. Raises
    InputError."""
    try:
        raw = stream.readline(MAX_LINE + 1)
    except (OSError, EOFError, zlib.error, ZstdError) as error:
        message = f"cannot read on: {error}: is the file complete and of the kind its name says?"
        raise InputError(f"{file.name}:{number}: {message}", file=file.name, line=number) from error
    if len(raw) > MAX_LINE:
        limit = f"{MAX_LINE >> 20} MiB"
        fail(file.name, number, f"the line is longer than {limit}: is this the file's format, one row a line?")
    if number > 1:
        return raw
    for magic, found in _FOREIGN.items():
        if raw.startswith(magic):
            fail(file.name, 1, f"it looks like {found}")
    return raw.removeprefix(_BOM)


@contextmanager
def opened(file: InputFile) -> Generator[io.BufferedReader]:
    """Yield the bytes of a file. Raises InputError."""
    try:
        # A pipe may stand there by now: it must not be waited for.
        fd = os.open(file.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise InputError(
            f"cannot read {file.name}: {error.strerror or error}: check that it exists and its rights"
        ) from error
    with os.fdopen(fd, "rb") as raw:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise InputError(f"cannot read {file.name}: it is no regular file any more")
        yield raw


@contextmanager
def unpacked(file: InputFile) -> Generator[io.BufferedIOBase]:
    """Yield the decompressed bytes of a file. Raises InputError."""
    with opened(file) as raw:
        kind = _compression(file, raw)
        if kind == _GZIP:
            with gzip.GzipFile(fileobj=raw) as stream:
                yield stream
        elif kind == _ZSTD:
            with ZstdFile(raw, "rb") as stream:
                yield stream
        else:
            yield raw


def _compression(file: InputFile, raw: io.BufferedReader) -> bytes:
    """Return the compression by the first bytes, whatever the name; if they match none, by the name."""
    head = raw.peek(4)[:4]
    if found := next((magic for magic in (_GZIP, _ZSTD) if head.startswith(magic)), b""):
        return found
    suffix = Path(file.name).suffix if head else ""
    return {".gz": _GZIP, ".zst": _ZSTD, ".zstd": _ZSTD}.get(suffix, b"")
