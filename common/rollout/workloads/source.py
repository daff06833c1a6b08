"""The input edge of every workload: rows come out as they were checked, or not at all.

An input is read twice: once to find every fault before anything starts, and again when its rows are submitted. The
first reading leaves 8 bytes of hash for each row; the second compares each row with them before it hands it on.
It deals in lines and knows nothing of what they mean.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import stat
import tempfile
import zlib
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn, Self, cast

from backports.zstd import ZstdError, ZstdFile
from blake3 import blake3

from rollout.model.errors import InputChangedError, InputError
from rollout.workloads.input_files import InputFile, expand
from rollout.workloads.json_form import parse_json
from rollout.workloads.output import disk_errors
from rollout.workloads.spool import Spool, Stream, Tell, same_bytes

MAX_LINE = 64 << 20
"""Bytes of one line at most."""

FAULTS_MAX = 100
"""Faults that one check reports at most."""

_BOM = b"\xef\xbb\xbf"
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_HASH = 8
_BATCH = 2000  # rows between two progress calls
_AGAIN = "put it back as it was and give the same command again, or name another output.dir to start a new run"


@dataclass(slots=True)
class Line:
    """A line that is not blank, without its end: `index` among all rows from 0, `line` in its file from 1."""

    index: int
    file: str
    line: int
    raw: bytes

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class FileReport:
    path: str
    rows: int
    bytes: int  # of rows, after decompression
    digest: str  # blake3 over the hashes of its rows


@dataclass(frozen=True, slots=True)
class InputReport:
    """What a check has read. `digest` is over the rows of all files, whatever they are called."""

    rows: int
    bytes: int
    files: tuple[FileReport, ...]
    digest: str


def json_of(line: Line) -> Any:
    """The JSON value of a line, whatever its type. InputError with file and line."""
    try:
        return parse_json(line.raw)
    except ValueError as error:
        fail(line.file, line.line, str(error))


def fail(file: str, line: int, message: str) -> NoReturn:
    """Raise the InputError of a line: `file:line: message`."""
    raise InputError(f"{file}:{line}: {message}", file=file, line=line)


class Source:
    """`open`, `check`, then `rows` as often as need be; `close` always. One thread at a time.

    `notes`: what the person should be told of the files that were found.
    """

    def __init__(self, files: Sequence[InputFile], notes: Sequence[str], scratch: tempfile.TemporaryDirectory[str]):
        self.files = tuple(files)
        self.notes = tuple(notes)
        self._scratch = scratch
        self._hashes: IO[bytes] | None = None
        self._hashes_path = Path()
        self._report: InputReport | None = None

    @classmethod
    def open(
        cls,
        patterns: Sequence[str],
        *,
        exclude: Path,
        spool: Path | None = None,
        resumed: bool = False,
        written: Iterable[str] = (),
        tell: Tell = lambda _: None,
    ) -> Self:
        """Expand each pattern, once, and copy what can be read only once. Blocking. InputError with every fault.

        `exclude`: the run's output directory; a wildcard never reaches what a run writes, there (`written` and hidden
        files) or beside another `run-id`. `spool`: where copies of streams are kept, so that the same command can go
        on; None: nowhere, they are gone after `close`. `resumed`: the run is known, so a stream need not come again,
        and must be the same if it does. `tell` hears what is waited for, and may raise to stop.
        """
        scratch = tempfile.TemporaryDirectory(prefix="rollout-input-")
        try:
            copies = Spool(spool or Path(scratch.name), resumed=resumed and spool is not None, tell=tell)
            found = expand(patterns, exclude=exclude, written=written, spool=copies)
            files = [
                InputFile(one.name, copies.take(one), spooled=True) if isinstance(one, Stream) else one
                for one in found.found.values()
            ]
        except BaseException:
            scratch.cleanup()
            raise
        return cls(files, [*found.notes, *copies.notes], scratch)

    def close(self) -> None:
        if self._hashes is not None:
            with suppress(OSError):  # a full disk was told of already
                self._hashes.close()
            self._hashes_path.unlink(missing_ok=True)
        self._scratch.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the first reading

    def check(
        self,
        read: Callable[[Line], object],
        *,
        index: Path | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> InputReport:
        """Hand every row to `read`, which raises InputError with what is wrong with it. Blocking.

        InputError with every fault, each `file:line: what`, up to FAULTS_MAX. `index`: where `keep` will leave the
        hashes of the rows; until then they are beside it, or in a temporary directory. `progress(rows, bytes)` is
        called now and then, and may raise to stop. A check that raises has closed the source.
        """
        self._hashes_path = index.with_name(f"{index.name}.new") if index else Path(self._scratch.name) / "rows"
        try:
            with disk_errors(self._hashes_path):
                self._hashes = self._hashes_path.open("w+b")
                self._report = self._check(read, self._hashes, progress)
        except BaseException:
            self.close()
            raise
        return self._report

    def _check(
        self, read: Callable[[Line], object], hashes: IO[bytes], progress: Callable[[int, int], None] | None
    ) -> InputReport:
        faults: list[InputError] = []
        reports: list[FileReport] = []
        total, total_bytes, whole = 0, 0, blake3()
        for file in self.files:
            rows, size, digest = 0, 0, blake3()
            for line in _until_it_fails(file, total, faults):
                if len(faults) >= FAULTS_MAX:
                    break
                try:
                    read(line)
                except InputError as fault:
                    faults.append(fault)
                row_hash = blake3(line.raw).digest()
                digest.update(row_hash)
                whole.update(row_hash)
                hashes.write(row_hash[:_HASH])
                rows, size, total = rows + 1, size + len(line.raw), total + 1
                if progress and total % _BATCH == 0:
                    progress(total, total_bytes + size)
            total_bytes += size
            reports.append(FileReport(file.name, rows, size, digest.hexdigest()))
        if faults:
            raise _all_of(faults)
        if total == 0:
            names = ", ".join(file.name for file in self.files[:3])
            raise InputError(f"the input is empty: no row in {names}{' ...' if len(self.files) > 3 else ''}")
        if progress:
            progress(total, total_bytes)
        hashes.flush()
        return InputReport(total, total_bytes, tuple(reports), whole.hexdigest())

    def keep(self) -> None:
        """Put the hashes of what was checked in the place of those of an earlier check, for `first_change`."""
        report, hashes = self._checked()
        with disk_errors(self._hashes_path):
            hashes.seek(0, os.SEEK_END)
            hashes.write(json.dumps({"rows": report.rows, "digest": report.digest}).encode())
            hashes.flush()
            self._hashes_path.replace(self._hashes_path.with_suffix(""))

    def first_change(self, path: Path, digest: str) -> str | None:
        """The first row that differs from those whose hashes were kept at `path` under `digest`.

        None: all equal, or nothing is known of them any more.
        """
        report, hashes = self._checked()
        try:
            kept = path.open("rb")
        except OSError:
            return None
        with kept:
            rows = _rows_kept(kept, digest)
            if rows is None:
                return None
            hashes.seek(0)
            common = _common(hashes, kept, min(rows, report.rows))
        if common < report.rows:
            what = "was added" if common == rows else "is another than before"
            return f"{self._place(common)} {what}"
        return f"rows after {self._place(common - 1)} were removed" if rows > common else None

    # ---- the second reading

    def rows(self, start: int = 0) -> Iterator[Line]:
        """Rows from `start` on, lazily, each compared with what was checked before it is handed on.

        InputChangedError names the first that is not, and nothing after it is handed on.
        """
        report, hashes = self._checked()
        first = 0
        for file, checked in zip(self.files, report.files, strict=True):
            if first + checked.rows > start or (not checked.rows and first >= start):
                hashes.seek(first * _HASH)
                for line in self._compared(file, first, checked.rows, hashes):
                    if line.index >= start:
                        yield line
            first += checked.rows

    def _compared(self, file: InputFile, first: int, count: int, hashes: IO[bytes]) -> Iterator[Line]:
        rows, place = 0, hashes.tell()
        lines = _lines(file, first)
        while True:
            try:
                line = next(lines, None)
            except InputError as error:
                raise InputChangedError(
                    f"{error.message}\nrow {first + rows + 1} could be read when it was checked: {_AGAIN}"
                ) from error
            if line is None:
                break
            if rows == count:
                raise InputChangedError(
                    f"row {line.index + 1} ({line.where}) was not there when the input was checked: {file.name} grew "
                    f"beyond its {count} rows; {_AGAIN}"
                )
            hashes.seek(place + rows * _HASH)  # several readings may share the file
            if blake3(line.raw).digest(_HASH) != hashes.read(_HASH):
                raise InputChangedError(
                    f"row {line.index + 1} ({line.where}) is another than when it was checked; {_AGAIN}"
                )
            rows += 1
            yield line
        if rows < count:
            raise InputChangedError(
                f"{file.name} ends at row {first + rows}, {first + count} were checked: row {first + rows + 1} is "
                f"missing; {_AGAIN}"
            )

    def _checked(self) -> tuple[InputReport, IO[bytes]]:
        if self._report is None or self._hashes is None:
            raise RuntimeError("check() first")
        return self._report, self._hashes

    def _place(self, index: int) -> str:
        first = 0
        for file, checked in zip(self.files, self._checked()[0].files, strict=True):
            if index < first + checked.rows:
                for line in _lines(file, first):
                    if line.index == index:
                        return f"row {index + 1} ({line.where})"
            first += checked.rows
        return f"row {index + 1}"


class UniqueIds:
    """Ids that rows bring along, told apart by the text that they become in a file: 1 and "1" are one.

    A digest of each is kept, and 16 bytes of where it stands: memory does not depend on their length.
    """

    def __init__(self) -> None:
        self._seen: set[bytes] = set()
        self._hashes = array("Q")
        self._places = array("Q")
        self._files: list[str] = []

    def add(self, line: Line, key: str, value: object) -> None:
        """InputError that names both rows if an earlier one has it, or if it is neither a string nor an integer."""
        if isinstance(value, bool) or not isinstance(value, str | int):
            fail(line.file, line.line, f'"{key}" must be a string or an integer')
        digest = blake3(json.dumps(str(value)).encode()).digest(16)
        short = int.from_bytes(digest[:8])
        if digest in self._seen:
            place = self._places[self._hashes.index(short)]
            earlier = f"{self._files[place >> 48]}:{place & ((1 << 48) - 1)}"
            fail(
                line.file,
                line.line,
                f'"{key}" {value!r} is used by an earlier row ({earlier}): every {key} must be unique, and a number '
                "is the same as the text of its digits",
            )
        if not self._files or self._files[-1] != line.file:
            self._files.append(line.file)
        self._seen.add(digest)
        self._hashes.append(short)
        self._places.append((len(self._files) - 1) << 48 | line.line)


def _all_of(faults: list[InputError]) -> InputError:
    if len(faults) == 1:
        return faults[0]
    lines = [fault.message for fault in faults]
    if len(faults) >= FAULTS_MAX:
        lines.append(f"these are the first {FAULTS_MAX} faults; there may be more")
    return InputError("\n".join(lines), **faults[0].context)


def _rows_kept(kept: IO[bytes], digest: str) -> int | None:
    """The number of hashes before the last line, which says what they are; `kept` is at its beginning afterwards."""
    size = kept.seek(0, os.SEEK_END)
    kept.seek(max(0, size - 200))
    tail = kept.read()
    start = tail.rfind(b'{"rows":')
    try:
        end = cast(dict[str, Any], json.loads(tail[start:])) if start >= 0 else {}
    except ValueError:
        end = {}
    kept.seek(0)
    rows = end.get("rows")
    whole = end.get("digest") == digest and rows is not None and size - len(tail) + start == rows * _HASH
    return rows if whole else None


def _common(one: IO[bytes], other: IO[bytes], rows: int) -> int:
    """How many of the first `rows` hashes are equal."""
    done = 0
    while done < rows:
        count = min(8192, rows - done)
        left, right = one.read(count * _HASH), other.read(count * _HASH)
        if left != right:
            return done + same_bytes(left, right) // _HASH
        done += count
    return done


def _until_it_fails(file: InputFile, first: int, faults: list[InputError]) -> Iterator[Line]:
    try:
        yield from _lines(file, first)
    except InputError as fault:
        faults.append(fault)


def _lines(file: InputFile, first: int) -> Iterator[Line]:
    number, index = 0, first
    with _opened(file) as stream:
        while True:
            try:
                raw = stream.readline(MAX_LINE + 1)
            except (OSError, EOFError, zlib.error, ZstdError) as error:
                message = f"cannot read on: {error}: is the file complete and of the kind its name says?"
                raise InputError(f"{file.name}:{number + 1}: {message}", file=file.name, line=number + 1) from error
            if not raw:
                return
            number += 1
            if len(raw) > MAX_LINE:
                limit = f"{MAX_LINE >> 20} MiB"
                fail(file.name, number, f"the line is longer than {limit}: is this JSONL, one object a line?")
            if number == 1 and raw.startswith(_BOM):
                raw = raw[3:]
            raw = raw.strip()
            if raw:
                yield Line(index, file.name, number, raw)
                index += 1


@contextmanager
def _opened(file: InputFile) -> Generator[io.BufferedIOBase]:
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
    """By the name; of a stream, whose name says nothing, by how it begins."""
    suffix = Path(file.name).suffix
    if suffix == ".gz":
        return _GZIP
    if suffix in (".zst", ".zstd"):
        return _ZSTD
    head = raw.peek(4)[:4] if file.spooled else b""
    return next((magic for magic in (_GZIP, _ZSTD) if head.startswith(magic)), b"")
