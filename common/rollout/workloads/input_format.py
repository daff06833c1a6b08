"""The formats of input files, and how they become rows (`[input] format`, `columns`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, cast

from rollout.workloads.delimited import delimited_rows
from rollout.workloads.input_files import InputFile
from rollout.workloads.input_lines import Line, lines_of
from rollout.workloads.json_form import dump_row, parse_json
from rollout.workloads.sections import Format
from rollout.workloads.tables import table_rows

_DELIMITERS = {"csv": ",", "tsv": "\t"}
_PACKED = (".gz", ".zst", ".zstd")


@dataclass(frozen=True, slots=True)
class InputFormat:
    """`kind` applies to all files; auto goes by each name, and is JSONL if the name says nothing. `columns` maps
    columns to keys of rows. `split` is that of a dataset with several."""

    kind: Format = "auto"
    columns: Mapping[str, str] = field(default_factory=dict[str, str])
    split: str | None = None

    def rows(self, file: InputFile, first: int = 0) -> Iterator[Line]:
        """Yield the rows of `file`, lazily; `first` is the index of its first. Raises InputError if it cannot be read
        to its end."""
        kind = _kind_of(file) if self.kind == "auto" else self.kind
        if kind == "parquet" or kind == "dataset":
            return table_rows(kind, file, self.columns, first)
        if kind in _DELIMITERS:
            return delimited_rows(file, _DELIMITERS[kind], self.columns, first)
        return _renamed(lines_of(file, first), self.columns) if self.columns else lines_of(file, first)

    def is_lines(self, file: InputFile) -> bool:
        """Return whether its rows are lines that can be read while more are written."""
        kind = _kind_of(file) if self.kind == "auto" else self.kind
        packed = PurePosixPath(file.name).suffix.lower() in _PACKED
        return not packed and kind not in ("parquet", "dataset", *_DELIMITERS)


JSONL = InputFormat("jsonl")


def _kind_of(file: InputFile) -> str:
    if file.path.is_dir():
        return "dataset"
    path = PurePosixPath(file.name)
    if path.suffix.lower() in _PACKED:
        path = path.with_suffix("")
    return path.suffix.lower().lstrip(".")


def _renamed(lines: Iterator[Line], columns: Mapping[str, str]) -> Iterator[Line]:
    """Yield lines of JSON with renamed keys. A line without a key stays unchanged, because lines differ."""
    for line in lines:
        try:
            value = parse_json(line.raw)
        except ValueError:
            yield line  # whose reader says what is wrong
            continue
        if isinstance(value, dict):
            fields = cast("dict[str, Any]", value)
            row = {columns.get(key, key): inner for key, inner in fields.items()}
            if len(row) < len(fields):
                both = next(key for key in columns if key in fields and columns[key] in fields)
                line.fault = f'input.columns makes "{columns[both]}" of "{both}", and the row has both'
            else:
                line = replace(line, raw=dump_row(row), value=row)
        yield line
