"""Writes a result file as parquet, from its JSON Lines when they are complete (`[output] format`).

The lines stay, because a run continues from files that only grow. The parquet file appears atomically, and is written
again if the lines or the file have changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from rollout.files import replacing
from rollout.workloads.column_types import ListOf, ObjectOf, Type, is_exact, merged, type_of
from rollout.workloads.json_form import JsonObject
from rollout.workloads.output import Mark, disk_errors, mark_of, saved_state, seal, unseal, write_atomically
from rollout.workloads.tables import pyarrow

_ROWS, _BYTES = 20_000, 16 << 20
"""Maximum rows of a row group, and bytes of its lines."""


def require_pyarrow() -> None:
    """Raise ConfigError if this host cannot write parquet."""
    pyarrow('output.format = "parquet"')


def parquet_name(name: str) -> str:
    """Return the name of the parquet file for the lines `name`."""
    return Path(name).with_suffix(".parquet").name


def write_parquet(directory: Path, name: str) -> list[str]:
    """Write the parquet file of the lines `name`, which a collector has finished, unless it exists, and return its
    path. Without such lines, nothing is written. Raises StorageFullError or StorageError. Blocking."""
    lines, path = directory / name, directory / parquet_name(name)
    record = directory / f".{path.name}.json"
    state = saved_state(directory)
    of = None if state is None else state["files"].get(lines.name)
    if of is None or not of["lines"] or _record(record) == {"lines": of, "file": _mark(path)}:
        return []
    pa = pyarrow('output.format = "parquet"')
    columns: dict[str, Type] = {}
    with disk_errors(lines):
        for row, _ in _rows(lines):
            for key, value in row.items():
                kind = type_of(value)
                before = columns.get(key)
                if kind != before:
                    columns[key] = kind if before is None else merged(before, kind)
    schema = pa.schema([(key, _arrow(pa, kind)) for key, kind in columns.items()])
    as_text: dict[str, Type] = {key: kind for key, kind in columns.items() if not is_exact(kind)}
    with disk_errors(path), replacing(path) as file, pa.parquet.ParquetWriter(file, schema) as writer:
        for rows in _batches(lines):
            for row in rows:
                row.update({key: _fit(row[key], kind) for key, kind in as_text.items() if key in row})
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    write_atomically(record, seal({"lines": of, "file": _mark(path)}))
    return [str(path)]


def _record(path: Path) -> JsonObject | None:
    with suppress(OSError):
        return unseal(path.read_bytes())
    return None


def _mark(path: Path) -> JsonObject | None:
    found: Mark | None = mark_of(path)
    return None if found is None else asdict(found)


def _rows(path: Path) -> Iterator[tuple[JsonObject, int]]:
    """Yield (row, bytes of its line)."""
    with path.open("rb") as file:
        for line in file:
            row = json.loads(line)
            yield (_unicode(row) if b"\\u" in line else row), len(line)


def _batches(path: Path) -> Iterator[list[JsonObject]]:
    batch: list[JsonObject] = []
    size = 0
    for row, length in _rows(path):
        batch.append(row)
        size += length
        if len(batch) >= _ROWS or size >= _BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _unicode(value: Any) -> Any:
    """Return `value` with U+FFFD for lone surrogates, which UTF-8 cannot represent."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_unicode(inner) for inner in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {_unicode(key): _unicode(inner) for key, inner in cast(JsonObject, value).items()}
    return value


def _arrow(pa: Any, kind: Type) -> Any:
    if isinstance(kind, ListOf):
        return pa.list_(_arrow(pa, kind.inner))
    if isinstance(kind, ObjectOf) and kind.fields:
        return pa.struct([(key, _arrow(pa, inner)) for key, inner in kind.fields.items()])
    match kind:
        case "bool":
            return pa.bool_()
        case "int" | "long":
            return pa.int64()
        case "float":
            return pa.float64()
        case _:
            return pa.string()


def _fit(value: Any, kind: Type) -> Any:
    if value is None or is_exact(kind):
        return value
    if isinstance(kind, ListOf):
        return [_fit(inner, kind.inner) for inner in value]
    if isinstance(kind, ObjectOf) and kind.fields:
        return {key: _fit(inner, kind.fields[key]) for key, inner in value.items()}
    if kind == "words":
        return str(value)
    return json.dumps(value, ensure_ascii=False)
