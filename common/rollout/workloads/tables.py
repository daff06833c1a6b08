"""Reads Parquet files and datasets on disk, in batches, never a whole file, with pyarrow (extra `parquet`).

A row is an object without nulls, at any depth: columns have null where JSON has no key. Types that JSON lacks become
text: times in ISO 8601, decimals in digits, bytes in base64; a duration becomes a number of seconds.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import date, time, timedelta
from decimal import Decimal
from importlib import import_module
from typing import Any, Literal, cast
from uuid import UUID

from pydantic_core import to_json

from rollout.model.errors import ConfigError, InputError
from rollout.workloads.columns import row_keys
from rollout.workloads.input_files import InputFile
from rollout.workloads.input_lines import MAX_LINE, UNREAD, Line, fail, opened
from rollout.workloads.json_form import JsonObject
from rollout.workloads.saved_datasets import arrow_files

Table = Literal["parquet", "dataset"]

_ROWS, _BYTES = 2000, 16 << 20
"""Maximum rows of a batch, and about as many bytes of text."""
_BUFFER = 1 << 20
_NAMES: Mapping[Table, str] = {"parquet": "parquet file", "dataset": "dataset"}


def pyarrow(what: str) -> Any:
    """Return the package. `what` needs it, in messages. Raises ConfigError if it is not installed."""
    try:
        import_module("pyarrow.parquet")
        return import_module("pyarrow")
    except ImportError as error:
        raise ConfigError(
            f'{what} needs the Python package pyarrow: pip install "rollout-engine[parquet]"', package="pyarrow"
        ) from error


def table_rows(kind: Table, file: InputFile, columns: Mapping[str, str], first: int = 0) -> Iterator[Line]:
    """Yield rows in order, `line` being the number of each. `columns` is that of `row_keys`, `first` the index of the
    first. A row that JSON cannot represent (NaN, text that is not UTF-8) has that as its fault.

    Raises InputError if the file cannot be read to its end, or its columns are wrong.
    """
    try:
        pa = pyarrow(file.name)
    except ConfigError as error:
        raise InputError(error.message, **error.context) from error
    number = 0
    try:
        with _OPENED[kind](pa, file) as (schema, batches):
            rows = _Rows(pa, schema, row_keys(schema.names, columns, file.name))
            for batch in batches:
                for raw, value, fault in rows.of(batch):
                    number += 1
                    yield Line(first + number - 1, file.name, number, raw, fault, False, value)
    except (pa.ArrowException, OSError, EOFError) as error:
        why = str(error).partition("\n")[0].rstrip(".")
        if not number:
            raise InputError(f"{file.name}: it cannot be read as a {_NAMES[kind]}: {why}") from error
        fail(file.name, number + 1, f"cannot read on: {why}: is the {_NAMES[kind]} complete?")


# ---- files to batches


@contextmanager
def _parquet(pa: Any, file: InputFile) -> Generator[tuple[Any, Iterator[Any]]]:
    """Yield (schema, batches)."""
    with opened(file) as raw:
        # A buffer: else a whole column of a row group is in memory.
        table = pa.parquet.ParquetFile(raw, buffer_size=_BUFFER)
        found = table.metadata
        size = sum(found.row_group(i).total_byte_size for i in range(found.num_row_groups))
        rows = min(_ROWS, max(1, _BYTES * found.num_rows // max(size, 1)))
        yield table.schema_arrow, table.iter_batches(batch_size=rows, use_threads=False)


@contextmanager
def _dataset(pa: Any, file: InputFile) -> Generator[tuple[Any, Iterator[Any]]]:
    """Yield (schema, batches)."""
    paths = arrow_files(file.name, file.path)

    def batches() -> Iterator[Any]:
        for path in paths:
            with pa.OSFile(str(path)) as raw, pa.ipc.open_stream(raw) as stream:
                for batch in stream:
                    rows = min(_ROWS, max(1, _BYTES * batch.num_rows // max(batch.nbytes, 1)))
                    yield from (batch.slice(start, rows) for start in range(0, batch.num_rows, rows))

    if not paths:
        yield pa.schema([]), iter(())
        return
    with pa.OSFile(str(paths[0])) as raw, pa.ipc.open_stream(raw) as stream:
        schema = stream.schema
    yield schema, batches()


_OPENED: Mapping[Table, Callable[[Any, InputFile], AbstractContextManager[tuple[Any, Iterator[Any]]]]] = {
    "parquet": _parquet,
    "dataset": _dataset,
}


# ---- batches to rows


class _Rows:
    """Converts the batches of a table to rows."""

    def __init__(self, pa: Any, schema: Any, keys: Sequence[str]) -> None:
        self._keys = keys
        kinds = list(schema.types)
        wanted = [_readable(pa, kind) for kind in kinds]
        self._casts = [None if new == kind else new for kind, new in zip(kinds, wanted, strict=True)]
        self._nested = [pa.types.is_nested(kind) for kind in kinds]
        self._native = all(_native(pa.types, kind) for kind in kinds)
        self._errors = (pa.ArrowException, ValueError, KeyError, OverflowError)

    def of(self, batch: Any) -> Iterator[tuple[bytes, Any, str]]:
        """Yield (JSON, the same as a value or UNREAD, fault) for each row."""
        try:
            rows = self._read(batch)
        except self._errors as error:
            if batch.num_rows == 1:
                yield json.dumps(str(error)).encode(), UNREAD, f"it cannot be read: {error}"
                return
            for i in range(batch.num_rows):
                yield from self.of(batch.slice(i, 1))
            return
        for row in rows:
            try:
                raw = self._encode(row)
            except (ValueError, TypeError) as error:
                key = next(key for key, value in row.items() if not _fits(value))
                yield json.dumps(row, default=str).encode(), UNREAD, f"JSON cannot hold the column {key!r}: {error}"
                continue
            fault = f"the row is longer than {MAX_LINE >> 20} MiB as JSON" if len(raw) > MAX_LINE else ""
            yield raw, row if self._native else UNREAD, fault

    def _encode(self, row: JsonObject) -> bytes:
        """Encode a row. Raises ValueError or TypeError if JSON cannot represent it."""
        if self._native:  # twice as fast as Python's own encoder
            raw = to_json(row, inf_nan_mode="constants")
            if not (b"NaN" in raw or b"Infinity" in raw):
                return raw
        return _encode(row).encode()

    def _read(self, batch: Any) -> list[JsonObject]:
        columns: list[list[Any]] = []
        for column, kind, nested in zip(batch.columns, self._casts, self._nested, strict=True):
            values = (column if kind is None else column.cast(kind)).to_pylist(maps_as_pydicts="strict")
            columns.append([without_nulls(value) for value in values] if nested else values)
        keys = self._keys
        rows = zip(*columns, strict=True) if columns else (() for _ in range(batch.num_rows))
        return [{key: value for key, value in zip(keys, row, strict=True) if value is not None} for row in rows]


def without_nulls(value: Any) -> Any:
    """Return `value` without null values of objects, at any depth."""
    if isinstance(value, dict):
        found = cast("dict[str, Any]", value)
        return {key: without_nulls(inner) for key, inner in found.items() if inner is not None}
    if isinstance(value, list):
        return [without_nulls(inner) for inner in cast("list[Any]", value)]
    return value


def _readable(pa: Any, kind: Any) -> Any:
    """Return a type in which Python can read all of `kind`: it has no nanoseconds and no half floats."""
    types = pa.types
    if types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if types.is_time64(kind) or types.is_duration(kind):
        return (pa.time64 if types.is_time64(kind) else pa.duration)("us") if kind.unit == "ns" else kind
    if types.is_float16(kind):
        return pa.float32()
    if types.is_struct(kind):
        return pa.struct([field.with_type(_readable(pa, field.type)) for field in kind])
    if types.is_list(kind) or types.is_large_list(kind):
        make = pa.list_ if types.is_list(kind) else pa.large_list
        return make(kind.value_field.with_type(_readable(pa, kind.value_type)))
    if types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_readable(pa, kind.value_type)), kind.list_size)
    return kind


def _native(types: Any, kind: Any) -> bool:
    """Return whether values of `kind` equal what their JSON parses to."""
    if types.is_struct(kind):
        return all(_native(types, field.type) for field in kind)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _native(types, kind.value_type)
    simple = (types.is_null, types.is_boolean, types.is_integer, types.is_floating, types.is_string)
    return any(check(kind) for check in (*simple, types.is_large_string))


def _text(value: Any) -> str | float:
    """Convert a value of a type that JSON lacks."""
    match value:
        case date() | time():  # and datetime, which is a date
            return value.isoformat()
        case Decimal() | UUID():
            return str(value)
        case bytes():
            return base64.b64encode(value).decode()
        case timedelta():
            return value.total_seconds()
        case _:
            raise TypeError(f"it has values of type {type(value).__name__}")


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_text).encode


def _fits(value: Any) -> bool:
    try:
        _encode(value)
    except (ValueError, TypeError):
        return False
    return True
