"""CSV and TSV files: a header, then a record per row. Every value is a string; an empty cell is no value.

As in RFC 4180, cells with the delimiter, a quote or a line end are in double quotes, in which a quote is doubled.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping

from rollout.workloads.columns import row_keys
from rollout.workloads.input_files import InputFile
from rollout.workloads.input_lines import MAX_LINE, Line, fail, read_line, unpacked
from rollout.workloads.json_form import dump_row


def delimited_rows(file: InputFile, delimiter: str, columns: Mapping[str, str], first: int = 0) -> Iterator[Line]:
    """Yield rows, each an object of strings. `columns` is that of `row_keys`, `first` the index of the first row. A row
    with another number of cells than the header, or that is not UTF-8, has that as its fault.

    Raises InputError if the header is wrong, the file cannot be read to its end, or a quote is not closed.
    """
    csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE))
    with unpacked(file) as stream:
        records = _Records(file, stream, delimiter)
        keys: list[str] | None = None
        index = first
        for cells in records:
            fault = records.fault or _not_utf8(cells)
            if keys is None:
                if fault:
                    fail(file.name, records.begins, fault)
                if cells[0] not in columns and (other := _other_delimiter(cells, delimiter)):
                    fail(file.name, records.begins, other)
                keys = row_keys(cells, columns, f"{file.name}:{records.begins}")
                continue
            if not fault and len(cells) != len(keys):
                fault = (
                    f"the row has {len(cells)} cells and the header {len(keys)}: put cells that hold a {delimiter!r}, "
                    "a quote or a line end into double quotes"
                )
            if fault:
                yield Line(index, file.name, records.begins, json.dumps(cells).encode(), fault)
            else:
                row = {key: cell for key, cell in zip(keys, cells, strict=True) if cell}
                yield Line(index, file.name, records.begins, dump_row(row), value=row)
            index += 1


def _other_delimiter(header: list[str], delimiter: str) -> str:
    """Return the fault of a header with one column, which has another delimiter."""
    found = next((other for other in ",;\t|" if other != delimiter and other in header[0]), "")
    if len(header) > 1 or not found:
        return ""
    remedy = {",": 'set format = "csv"', "\t": 'set format = "tsv"'}.get(found, f"save it with {delimiter!r}")
    return f"the header is one column, {header[0]!r}: cells are separated by {delimiter!r}, not by {found!r}: {remedy}"


def _not_utf8(cells: list[str]) -> str:
    try:
        "".join(cells).encode()
    except UnicodeEncodeError:
        return "not UTF-8: save the file as UTF-8"
    return ""


class _Records:
    """Cells of each record that is not blank. `begins` is the first line of the current one; `fault` says why it cannot
    be read, and `cells` is then its text."""

    def __init__(self, file: InputFile, stream: io.BufferedIOBase, delimiter: str) -> None:
        self.begins = 0
        self.fault = ""
        self._file = file
        self._line = 0
        self._text = ""
        self._ended = False
        self._reader = csv.reader(self._lines(stream), delimiter=delimiter, strict=True)

    def __iter__(self) -> Iterator[list[str]]:
        while True:
            self.begins, self.fault = self._line + 1, ""
            try:
                cells = next(self._reader, None)
            except csv.Error as error:
                if self._ended or self._line > self.begins:  # where the next record begins cannot be told
                    fail(
                        self._file.name, self.begins, f"a quote that opens here is not closed where it should: {error}"
                    )
                self.fault = f"malformed: {error}: double the quotes inside of a quoted cell"
                cells = [self._text.rstrip("\r\n")]
            if cells is None:
                return
            if len(cells) > 1 or (cells and cells[0].strip()):
                yield cells

    def _lines(self, stream: io.BufferedIOBase) -> Iterator[str]:
        while raw := read_line(self._file, stream, self._line + 1):
            self._line += 1
            self._text = raw.decode("utf-8", "surrogateescape")
            yield self._text
        self._ended = True
