"""The input of every workload: rows come out as they were checked, or not at all.

An input is read twice: once to find every fault before anything starts, and again when its rows are submitted. The
first reading leaves 8 bytes of hash for each row; the second compares each row with its hash before it passes it on. It
deals with lines and does not interpret them.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Self, cast

from blake3 import blake3

from rollout.cloud.url import BucketUrl, parse_url
from rollout.config.cloud import CloudSection
from rollout.config.scratch import Scratch
from rollout.model.counts import counted
from rollout.model.errors import ConfigError, InputChangedError, InputError
from rollout.model.problems import faults_of
from rollout.workloads.following import NoRowsYetError, Parts, PartsReader
from rollout.workloads.input_files import Expansion, InputFile, expand
from rollout.workloads.input_format import JSONL, InputFormat
from rollout.workloads.input_lines import Line, fail
from rollout.workloads.input_selection import ALL, Selected, Selection
from rollout.workloads.output import RUN_ID, disk_errors
from rollout.workloads.remote_files import Matches, RemoteFile, RemoteFiles
from rollout.workloads.spool import Spool, Stream, Tell, same_bytes

FAULTS_MAX = 100
"""Maximum number of faults that a check reports."""

OBJECTS = "objects"
"""Directory below the spool with copies of objects, by the key of the configuration that names them."""

_HASH = 8
_KINDS_MAX = 8
_BATCH = 2000  # rows between two progress calls
_AGAIN = "put it back as it was and give the same command again, or name another output directory to start a new run"


@dataclass(frozen=True, slots=True)
class FileReport:
    path: str
    rows: int
    bytes: int  # of rows, after decompression
    digest: str  # blake3 over the hashes of its rows


@dataclass(frozen=True, slots=True)
class InputReport:
    """What a check has read. `digest` is over the rows of all files, whatever their names.

    `invalid` counts the `rows` that are left out. `faults` are those of the first of them. `selection` is the part of
    the input that was read, and counts are of it. `followed` means that `files` are parts of files.
    """

    rows: int
    bytes: int
    files: tuple[FileReport, ...]
    digest: str
    invalid: int = 0
    faults: tuple[str, ...] = ()
    selection: Selection = ALL
    followed: bool = False


NO_ROWS = InputReport(0, 0, (), "")
"""The report of an input whose rows come from elsewhere."""


class Source:
    """Call `open`, `check`, then `rows` as often as needed, and `close` always, in one thread at a time.

    `notes` are for the user, about the files found, which are at `paths`.
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        notes: Sequence[str],
        scratch: tempfile.TemporaryDirectory[str],
        remote: RemoteFiles | None = None,
        form: InputFormat = JSONL,
        selection: Selection = ALL,
        *,
        followed: bool = False,
    ):
        self.files: tuple[InputFile, ...] = tuple(files)
        self.paths = tuple(dict.fromkeys(file.path for file in files))
        self._form = form
        self._followed = followed
        self._selection = selection
        self._selected = Selected(form, selection)
        self._remote = remote
        self.notes = tuple(notes)
        self._scratch = scratch
        self._hashes: IO[bytes] | None = None
        self._hashes_path = Path()
        self._faults_path = Path(scratch.name) / "faults"
        self._report: InputReport | None = None
        self._beside: Callable[[Line], bytes] = _nothing

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
        key: str = "input.glob",
        cloud: CloudSection | None = None,
        own: BucketUrl | None = None,
        form: InputFormat = JSONL,
        selection: Selection = ALL,
        parts: Parts | None = None,
    ) -> Self:
        """Expand the patterns, once, and copy what can be read only once or is in a bucket. Blocking, and not in the
        thread of an event loop. Raises InputError with every fault.

        `exclude` is the run's output directory; a wildcard never matches what a run writes, there (`written` and hidden
        files) or next to another `run-id`. `spool` keeps copies of streams, so that the same command can resume; with
        None they are deleted by `close`. `resumed` means that the run is known, so a stream need not come again, and
        must be the same if it does. `tell` reports waiting, and may raise to stop. `key` is that of the configuration,
        in messages. `cloud` says how to reach buckets. `own` is the output, if that is in a bucket. `form` is the
        format of the files. `selection` limits the rows. With `parts`, the input is followed, and may still be empty.
        """
        urls = [pattern for pattern in patterns if looks_remote(pattern)]
        if parts is not None and urls:
            raise _not_here(key, urls[0])
        scratch = Scratch("rollout-input-")
        try:
            copies = Spool(spool or Path(scratch.name), resumed=resumed and spool is not None, tell=tell)
            objects = RemoteFiles(cloud or CloudSection(), (spool or Path(scratch.name)) / OBJECTS / key, tell)
            try:
                remote: dict[str, Matches] = objects.find(urls, RUN_ID) if urls else {}
                found = expand(
                    patterns,
                    exclude=exclude,
                    written=written,
                    spool=copies,
                    key=key,
                    remote=remote,
                    own=own,
                    form=form.kind,
                    split=form.split,
                    may_be_none=parts is not None,
                )
                streams = [one.name for one in found.found.values() if isinstance(one, Stream)]
                if parts is not None and streams:
                    raise _not_here(key, streams[0])
                files = _at_hand(found, copies, objects)
            finally:
                objects.close()
        except BaseException:
            scratch.cleanup()
            raise
        if parts is not None:
            files = parts.of_files(files, form)
        notes = [*found.notes, *copies.notes]
        return cls(files, notes, scratch, objects, form, selection, followed=parts is not None)

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
        beside: Callable[[Line], bytes] | None = None,
        index: Path | None = None,
        skip: bool | None = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> InputReport:
        """Pass every row to `read`, which raises InputError for a fault. Blocking.

        Raises InputError with every fault, each `file:line: what`, up to FAULTS_MAX, and the number of others. With
        `skip`, faulty rows are accepted, unless no other is left: `rows` yields them with their fault; None means that
        the workload cannot skip rows. `beside` returns further bytes that belong to a row, such as the hash of a file
        that it names. `index` is where `keep` will leave the hashes of the rows; until then they are next to it, or in
        a temporary directory. `progress(rows, bytes)` is called now and then, and may raise to stop. A check that
        raises has closed the source.
        """
        self._beside = beside or _nothing
        self._hashes_path = index.with_name(f"{index.name}.new") if index else Path(self._scratch.name) / "rows"
        try:
            with disk_errors(self._hashes_path):
                self._hashes = self._hashes_path.open("w+b")
                faults = Faults(self._faults_path if skip else None, skippable=skip is not None)
                self._report = self._check(read, self._hashes, faults, progress)
        except BaseException:
            self.close()
            raise
        return self._report

    def _check(
        self,
        read: Callable[[Line], object],
        hashes: IO[bytes],
        faults: Faults,
        progress: Callable[[int, int], None] | None,
    ) -> InputReport:
        reports: list[FileReport] = []
        total, total_bytes, whole = 0, 0, blake3()
        self._selected.open(self.files)
        reader = self._reader()
        for file in self.files:
            rows, size, digest = 0, 0, blake3()
            for line in _until_it_fails(reader.rows(file, total), faults):
                try:
                    if line.fault:
                        fail(line.file, line.line, line.fault)
                    read(line)
                except InputError as fault:
                    faults.of_row(line, fault)
                row_hash = self._hash(line)
                digest.update(row_hash)
                whole.update(row_hash)
                hashes.write(row_hash[:_HASH])
                rows, size, total = rows + 1, size + len(line.raw), total + 1
                if progress and total % _BATCH == 0:
                    progress(total, total_bytes + size)
            total_bytes += size
            reports.append(FileReport(file.name, rows, size, digest.hexdigest()))
        faults.close()
        if faults.fatal or (total and faults.rows == total and not self._followed):
            raise faults.error()
        if total == 0 and self._followed:
            raise NoRowsYetError("the input is empty so far")
        if total == 0:
            names = ", ".join(file.name for file in self.files[:3])
            raise InputError(f"the input is empty: no row in {names}{' ...' if len(self.files) > 3 else ''}")
        if progress:
            progress(total, total_bytes)
        hashes.flush()
        if self._followed:  # they may have grown since
            counted_files = zip(self.files, reports, strict=True)
            self.files = tuple(replace(file, rows=one.rows) for file, one in counted_files if one.rows)
            reports = [one for one in reports if one.rows]
        first = tuple(fault.message for fault in faults.first)
        return InputReport(
            total, total_bytes, tuple(reports), whole.hexdigest(), faults.rows, first, self._selection, self._followed
        )

    def verify_objects(self) -> None:
        """Check that the URLs still name the objects that were copied. Raises InputChangedError. Blocking, and not in
        the thread of an event loop."""
        if self._remote is not None:
            self._remote.verify()

    def keep(self) -> None:
        """Replace the hashes of an earlier check by those of this one, for `first_change`."""
        report, hashes = self._checked()
        with disk_errors(self._hashes_path):
            hashes.seek(0, os.SEEK_END)
            hashes.write(json.dumps({"rows": report.rows, "digest": report.digest}).encode())
            hashes.flush()
            self._hashes_path.replace(self._hashes_path.with_suffix(""))

    def first_change(self, path: Path, digest: str) -> str | None:
        """Return the first row that differs from those whose hashes were kept at `path` under `digest`.

        Returns None if all are equal, or if the hashes are no longer known.
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

    def added(self, path: Path, digest: str) -> int:
        """Return the number of rows after those of `digest`, whose hashes were kept at `path`, if all of these are
        unchanged.

        Returns 0 if none were added, or others changed.
        """
        report, hashes = self._checked()
        with suppress(OSError), path.open("rb") as kept:
            if (rows := _rows_kept(kept, digest)) is not None:
                if rows >= report.rows:
                    return 0
                hashes.seek(0)
                return report.rows - rows if _common(hashes, kept, rows) == rows else 0
        whole = blake3()  # killed before they were kept
        for line in self.rows():
            whole.update(self._hash(line))
            if whole.hexdigest() == digest:
                return report.rows - line.index - 1
        return 0

    # ---- the second reading

    def rows(self, start: int = 0) -> Iterator[Line]:
        """Yield rows from `start` on, lazily, each compared with the checked one before it is yielded.

        Raises InputChangedError at the first that differs.
        """
        report, hashes = self._checked()
        left_out = kept_faults(self._faults_path) if report.invalid else iter(())
        bad, fault, repeats = next(left_out, _NONE)
        first = 0
        reader = self._reader()
        for file, checked in zip(self.files, report.files, strict=True):
            if first + checked.rows > start or (not checked.rows and first >= start):
                hashes.seek(first * _HASH)
                for line in self._compared(reader, file, first, checked.rows, hashes):
                    while bad < line.index:
                        bad, fault, repeats = next(left_out, _NONE)
                    if bad == line.index:
                        line.fault, line.repeats = fault, repeats
                    if line.index >= start:
                        yield line
            first += checked.rows

    def _reader(self) -> Selected | PartsReader:
        return PartsReader(self._form, self.files) if self._followed else self._selected

    def _compared(
        self, reader: Selected | PartsReader, file: InputFile, first: int, count: int, hashes: IO[bytes]
    ) -> Iterator[Line]:
        rows, place = 0, hashes.tell()
        lines = reader.rows(file, first)
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
                    f"beyond its {counted(count, 'row')}; {_AGAIN}"
                )
            hashes.seek(place + rows * _HASH)  # several readings may share the file
            if self._hash(line)[:_HASH] != hashes.read(_HASH):
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

    def _hash(self, line: Line) -> bytes:
        return blake3(line.raw).update(self._beside(line)).digest()

    def _checked(self) -> tuple[InputReport, IO[bytes]]:
        if self._report is None or self._hashes is None:
            raise RuntimeError("check() first")
        return self._report, self._hashes

    def _place(self, index: int) -> str:
        first = 0
        for file, checked in zip(self.files, self._checked()[0].files, strict=True):
            if index < first + checked.rows:
                for line in self._reader().rows(file, first):
                    if line.index == index:
                        return f"row {index + 1} ({line.where})"
            first += checked.rows
        return f"row {index + 1}"


def _nothing(line: Line) -> bytes:
    return b""


def looks_remote(pattern: str) -> bool:
    """Return whether it is the URL of a bucket, even an invalid one."""
    try:
        return parse_url(pattern) is not None
    except ConfigError:
        return True


def _not_here(key: str, name: str) -> InputError:
    return InputError(f"{key}: files on this machine can be followed, and not {name}: remove it, or follow")


def _at_hand(found: Expansion, streams: Spool, objects: RemoteFiles) -> list[InputFile]:
    """Return everything found as local files."""
    there = [one for one in found.found.values() if isinstance(one, RemoteFile)]
    copies = dict(zip(there, objects.take(there), strict=True))
    files: list[InputFile] = []
    for one in found.found.values():
        if isinstance(one, Stream):
            files.append(InputFile(one.name, streams.take(one)))
        elif isinstance(one, RemoteFile):
            files.append(InputFile(one.name, copies[one]))
        else:
            files.append(one)
    return files


class UniqueIds:
    """Checks that rows' ids are unique by their text in a file: 1 and "1" are equal.

    It keeps a digest of each, and its place, so memory does not depend on their length.
    """

    def __init__(self) -> None:
        self._places: dict[bytes, int] = {}
        self._files: list[str] = []

    def add(self, line: Line, key: str, value: object) -> None:
        """Add an id. Raises InputError that names both rows if an earlier one has it, or if it is neither a string nor
        an integer."""
        if isinstance(value, bool) or not isinstance(value, str | int):
            fail(line.file, line.line, f'"{key}" must be a string or an integer')
        digest = blake3(json.dumps(str(value)).encode()).digest(16)
        place = self._places.get(digest)
        if place is not None:
            earlier = f"{self._files[place >> 48]}:{place & ((1 << 48) - 1)}"
            raise InputError(
                f"{line.where}: the {key} {json.dumps(value)} is used by {earlier} already: every {key} must be "
                "unique" + (", and a number is the same as the text of its digits" if str(value).isdigit() else ""),
                file=line.file,
                line=line.line,
                repeats=True,
            )
        if not self._files or self._files[-1] != line.file:
            self._files.append(line.file)
        self._places[digest] = (len(self._files) - 1) << 48 | line.line


class Faults:
    """Collects the faults of a check: the first FAULTS_MAX are kept, the others are counted by kind.

    `path` is where rows that are left out are written, with their fault; None if none may be left out. `skippable`
    means that the message may say how to leave them out.
    """

    def __init__(self, path: Path | None, *, skippable: bool = True) -> None:
        self.first: list[InputError] = []
        self.rows = 0  # that have one
        self.fatal = 0
        self._kinds: Counter[str] = Counter()
        self._file = None if path is None else path.open("wb")
        self._skippable = skippable and path is None

    def of_row(self, line: Line, fault: InputError) -> None:
        self.rows += 1
        if self._file is None:
            self.add(fault)
            return
        text = fault.message.removeprefix(f"{line.where}: ")
        self._file.write(json.dumps([line.index, text, "repeats" in fault.context]).encode() + b"\n")
        if len(self.first) < FAULTS_MAX:
            self.first.append(fault)

    def add(self, fault: InputError) -> None:
        """Add the fault of a file, or of a row that is not left out."""
        self.fatal += 1
        if self.fatal == 1 and self._file is not None:
            self.first.clear()  # of rows that may be left out
        if len(self.first) < FAULTS_MAX:
            self.first.append(fault)
        else:
            self._kinds[self._kind(fault)] += 1

    def _kind(self, fault: InputError) -> str:
        """Return the fault without the parts that differ from row to row."""
        text = re.sub(r"^.*?:\d+: ", "", fault.message)
        kind = re.sub(r"'[^']*'|\d[\d,]*", "...", text)
        return kind if kind in self._kinds or len(self._kinds) < _KINDS_MAX else "others"

    def error(self) -> InputError:
        count = self.fatal or self.rows
        if count == 1:
            return self.first[0]
        lines = [f"{count:,} problems:", *(f"  {fault.message}" for fault in self.first[:FAULTS_MAX])]
        if count > len(self.first):
            kinds = "; ".join(f"{times:,} x {kind}" for kind, times in self._kinds.most_common())
            lines.append(f"  and {count - len(self.first):,} more{f': {kinds}' if kinds else ''}")
        if count == self.rows and self._skippable:
            lines.append('To leave such rows out and run the others, set on_bad_row = "skip" in section [input]')
        return InputError("\n".join(lines), **self.first[0].context)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


_NONE = (1 << 63, "", False)


def kept_faults(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield (index, fault, whether it repeats an id) of the rows that are left out, in order."""
    with path.open("rb") as file:
        for text in file:
            index, fault, repeats = json.loads(text)
            yield index, fault, repeats


def _rows_kept(kept: IO[bytes], digest: str) -> int | None:
    """Return the number of hashes before the last line, which identifies them; `kept` is then at its beginning."""
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
    """Return how many of the first `rows` hashes are equal."""
    done = 0
    while done < rows:
        count = min(8192, rows - done)
        left, right = one.read(count * _HASH), other.read(count * _HASH)
        if left != right:
            return done + same_bytes(left, right) // _HASH
        done += count
    return done


def _until_it_fails(lines: Iterator[Line], faults: Faults) -> Iterator[Line]:
    try:
        yield from lines
    except InputError as error:
        for text in faults_of(error.message):
            faults.add(InputError(text, **error.context))
