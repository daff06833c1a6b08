"""Reading the input: JSONL over several files, in bounded memory, with file and line in every error."""

from __future__ import annotations

import glob
import gzip
import io
import json
import math
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import zstandard
from blake3 import blake3

from rollout.model.errors import InputError
from rollout.workloads.infer.config import InferConfig, SamplingSection, load_schema
from rollout.workloads.infer.request import RowRequest, parse_row
from rollout.workloads.json_form import JsonObject

MAX_LINE = 64 << 20
"""Bytes of one line at most."""

DEPTH_MAX = 100
"""Levels of a row: it is written again, level by level, by programs whose stacks are fuller than the reader's."""

_BOM = b"\xef\xbb\xbf"
_BATCH = 2000  # rows between two progress calls


@dataclass(slots=True)
class Row:
    """One row as written, its place among all rows and where it stands."""

    index: int
    file: str
    line: int
    fields: JsonObject
    raw: bytes

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class FileReport:
    path: str
    rows: int
    bytes: int  # of JSON, after decompression
    digest: str  # blake3 over the rows


@dataclass(frozen=True, slots=True)
class InputReport:
    rows: int
    bytes: int
    files: tuple[FileReport, ...]
    digest: str


def input_files(patterns: list[str]) -> list[Path]:
    """Files that match, pattern by pattern, each pattern's in sorted order, no file twice. InputError if none."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        # Path.glob takes no absolute patterns.
        matches = [Path(match) for match in sorted(glob.glob(pattern, recursive=True))]  # noqa: PTH207
        files = [match for match in matches if not match.is_dir()]
        if not files:
            raise InputError(
                f"input.glob: no file matches {pattern!r} (seen from {Path.cwd()}): check the path or make it absolute"
            )
        found.update(dict.fromkeys(files))
    return list(found)


def effective_sampling(config: InferConfig) -> SamplingSection:
    """[sampling] with the JSON schema read from its file. ConfigError."""
    schema = load_schema(config.sampling.json_schema)
    return config.sampling if schema is None else config.sampling.model_copy(update={"json_schema": schema})


def read_rows(files: list[Path]) -> Iterator[Row]:
    """Every row of `files`, lazily. Blank lines are skipped, but counted as lines. InputError."""
    index = 0
    for path in files:
        for line, raw in _lines(path):
            yield Row(index, str(path), line, _decode(path, line, raw), raw)
            index += 1


def request_of(row: Row, sampling: SamplingSection) -> RowRequest:
    """The row's request. InputError with file and line."""
    try:
        request = parse_row(row.fields, sampling)
        if b"\\u" in row.raw:  # only an escape can hold one: what is not escaped was decoded from UTF-8
            json.dumps([request.content, request.sampling.stop], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        fail(row.file, row.line, "the text holds half of a surrogate pair, which is no Unicode: repair the escape")
    except InputError as error:
        fail(row.file, row.line, error.message)
    return request


def check_input(
    config: InferConfig,
    *,
    index_path: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> InputReport:
    """Read and check every row before anything starts. InputError names the first that is wrong.

    `index_path` receives 8 bytes of hash per row, so that a later call can name the row that changed
    (`first_changed_row`). `progress(rows, bytes)` is called now and then.
    """
    sampling = effective_sampling(config)
    files = input_files(config.input.patterns)
    seen: set[bytes] = set()
    reports: list[FileReport] = []
    total, total_bytes = 0, 0
    whole = blake3()
    index = index_path.open("wb") if index_path else io.BytesIO()
    with index:
        for path in files:
            rows, size, digest = 0, 0, blake3()
            for line, raw in _lines(path):
                row = Row(total, str(path), line, _decode(path, line, raw), raw)
                request_of(row, sampling)
                _check_id(row, seen)
                row_hash = blake3(raw).digest()
                digest.update(row_hash)
                whole.update(row_hash)
                if index_path:
                    index.write(row_hash[:8])
                rows, size, total = rows + 1, size + len(raw), total + 1
                if progress and total % _BATCH == 0:
                    progress(total, total_bytes + size)
            total_bytes += size
            reports.append(FileReport(str(path), rows, size, digest.hexdigest()))
    if total == 0:
        names = ", ".join(str(path) for path in files[:3])
        raise InputError(f"the input is empty: no row in {names}{' ...' if len(files) > 3 else ''}")
    if progress:
        progress(total, total_bytes)
    return InputReport(total, total_bytes, tuple(reports), whole.hexdigest())


def first_changed_row(config: InferConfig, index_path: Path) -> str | None:
    """Place of the first row whose hash is not the one in `index_path`; None: all equal, or there is no index."""
    try:
        index = index_path.open("rb")
    except OSError:
        return None
    with index:
        place = None
        for row in read_rows(input_files(config.input.patterns)):
            place = f"row {row.index + 1} ({row.where})"
            expected = index.read(8)
            if not expected:
                return f"{place} was added"
            if expected != blake3(row.raw).digest()[:8]:
                return f"{place} is another than before"
        return f"rows after {place} were removed" if index.read(1) else None


def fail(file: str, line: int, message: str) -> NoReturn:
    raise InputError(f"{file}:{line}: {message}", file=file, line=line)


def _check_id(row: Row, seen: set[bytes]) -> None:
    key = "custom_id" if "body" in row.fields else "id"
    value = row.fields.get(key)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, str | int):
        fail(row.file, row.line, f'"{key}" must be a string or an integer')
    # 16 bytes tell millions of ids apart and bound memory whatever their length.
    digest = blake3(json.dumps(value).encode()).digest(16)
    if digest in seen:
        fail(row.file, row.line, f'"{key}" {value!r} is used by an earlier row: every {key} must be unique')
    seen.add(digest)


def _decode(path: Path, line: int, raw: bytes) -> JsonObject:
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        hint = (
            "it looks like UTF-16, convert it to UTF-8" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "save it as UTF-8"
        )
        fail(str(path), line, f"not UTF-8 at byte {error.start} of the line: {hint}")
    try:
        if text.startswith("\ufeff"):
            raise json.JSONDecodeError("Unexpected UTF-8 BOM (decode using utf-8-sig)", text, 0)
        value: Any = _decoder.decode(text)
    except json.JSONDecodeError as error:
        fail(str(path), line, f"malformed JSON: {error.msg} at column {error.colno}")
    except RecursionError:
        fail(str(path), line, "malformed JSON: nested too deeply")
    except ValueError as error:
        fail(str(path), line, f"malformed JSON: {error}")
    if not isinstance(value, dict):
        fail(str(path), line, f"a row must be a JSON object, not {type(value).__name__}")
    if raw.count(b"[") + raw.count(b"{") > DEPTH_MAX and _deeper(value, DEPTH_MAX):
        fail(str(path), line, f"malformed JSON: nested more than {DEPTH_MAX} levels deep")
    return cast(JsonObject, value)


def _deeper(value: Any, levels: int) -> bool:
    level: list[Any] = [value]
    for _ in range(levels):
        level = [part for one in level for part in _parts(one) if isinstance(part, dict | list)]
        if not level:
            return False
    return True


def _parts(value: Any) -> Iterable[Any]:
    return cast(JsonObject, value).values() if isinstance(value, dict) else value


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


_decoder = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(1-based line, content without the line end) of every line that is not blank."""
    line = 0
    with _opened(path) as stream:
        while True:
            try:
                raw = stream.readline(MAX_LINE + 1)
            except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
                raise InputError(
                    f"{path}:{line + 1}: cannot read on: {error}: is the file complete and of the kind its name says?"
                ) from error
            if not raw:
                return
            line += 1
            if len(raw) > MAX_LINE:
                fail(
                    str(path), line, f"the line is longer than {MAX_LINE >> 20} MiB: is this JSONL, one object a line?"
                )
            if line == 1 and raw.startswith(_BOM):
                raw = raw[3:]
            raw = raw.strip()
            if raw:
                yield line, raw


@contextmanager
def _opened(path: Path) -> Generator[io.BufferedIOBase]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror or error}: check that it exists and its rights"
        ) from error
    with file:
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=file) as stream:
                yield stream
        elif path.suffix in (".zst", ".zstd"):
            reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            with io.BufferedReader(cast(io.RawIOBase, reader), 1 << 20) as stream:
                yield stream
        else:
            yield file
