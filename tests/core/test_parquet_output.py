"""Lines of results as parquet: types, order, and what a kill leaves."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout.model.errors import StorageFullError
from rollout.workloads import output, parquet_output
from rollout.workloads.input_files import InputFile
from rollout.workloads.input_lines import json_of
from rollout.workloads.json_form import dump_line
from rollout.workloads.output import ResultFiles
from rollout.workloads.parquet_output import write_parquet
from rollout.workloads.tables import table_rows, without_nulls

RUN = "01J00000000000000000000000"
PATH = Path("completions.parquet")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def finished(rows: list[dict[str, Any]], name: str = "completions.jsonl") -> None:
    """As a collector leaves the lines of a run."""
    files = ResultFiles(Path(), RUN, [name])
    files.restart()
    for row in rows:
        files.append(name, dump_line(row))
    files.finish(len(rows), {}, {})
    files.close()


def made(rows: list[dict[str, Any]]) -> list[Any]:
    finished(rows)
    write_parquet(Path(), "completions.jsonl")
    return [json_of(line) for line in table_rows("parquet", InputFile("p", PATH), {})]


def test_rows_go_in_and_come_out_in_order_with_their_types() -> None:
    rows = [
        {"id": n, "text": f"é {n}", "score": n / 3, "ok": n % 2 == 0, "tags": ["a", "b"][: n % 3], "usage": {"n": n}}
        for n in range(100)
    ]
    rows[7]["late"] = [{"x": 1.0}]
    assert made(rows) == rows
    schema = parquet.read_schema(PATH)
    assert schema.names == ["id", "text", "score", "ok", "tags", "usage", "late"]
    assert [str(schema.field(name).type) for name in ("id", "score", "ok")] == ["int64", "double", "bool"]


@pytest.mark.parametrize(
    ("values", "read"),
    [
        ([1, 2.5], [1.0, 2.5]),
        ([1, "a"], ["1", "a"]),
        ([1, True], ["1", "true"]),
        ([2**53 + 1, 0.5], [str(2**53 + 1), "0.5"]),
        ([2**53 + 1, 1], [2**53 + 1, 1]),
        ([2**64, 1], [str(2**64), "1"]),
        ([[1], {"a": 1}], ["[1]", '{"a": 1}']),
        ([{"a": 1}, {"a": "x", "b": 2}], [{"a": "1"}, {"a": "x", "b": 2}]),
        ([[], [{}]], [[], ["{}"]]),
        (["\ud83d", "\ud83d\ude00"], ["\ufffd", "\U0001f600"]),
    ],
)
def test_values_of_several_types(values: list[Any], read: list[Any]) -> None:
    assert made([{"v": value} for value in values]) == [{"v": value} for value in read]


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


def _same(read: Any, value: Any) -> bool:
    """Equal, or the text of it."""
    if isinstance(value, dict) and isinstance(read, dict):
        return read.keys() == value.keys() and all(_same(read[key], value[key]) for key in value)
    if isinstance(value, list) and isinstance(read, list):
        return len(read) == len(value) and all(map(_same, read, value))
    if isinstance(read, str) and not isinstance(value, str):
        return without_nulls(json.loads(read)) == value
    if isinstance(read, str) and read != value:
        return json.loads(read) == value
    return bool(read == value)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), _values), max_size=6))
def test_any_rows_come_out_again(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> None:
    os.chdir(tmp_path_factory.mktemp("rows"))
    rows = [{"n": n, **row} for n, row in enumerate([{}, *rows])]  # as every result has a place
    found = made(rows)
    assert len(found) == len(rows) and all(map(_same, found, map(without_nulls, rows)))


def test_row_groups_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_output, "_ROWS", 10)
    assert made([{"n": n} for n in range(25)]) == [{"n": n} for n in range(25)]
    assert parquet.ParquetFile(PATH).metadata.num_row_groups == 3


def test_it_is_made_once_and_again_when_somebody_changed_it_or_the_lines_are_others() -> None:
    finished([{"n": 1}])
    assert write_parquet(Path(), "completions.jsonl") == ["completions.parquet"]
    assert write_parquet(Path(), "completions.jsonl") == []
    PATH.write_bytes(PATH.read_bytes()[:-1])
    assert write_parquet(Path(), "completions.jsonl") == ["completions.parquet"]
    PATH.unlink()
    assert write_parquet(Path(), "completions.jsonl") == ["completions.parquet"]
    finished([{"n": 1}, {"n": 2}])
    assert write_parquet(Path(), "completions.jsonl") == ["completions.parquet"]
    assert parquet.read_table(PATH).to_pylist() == [{"n": 1}, {"n": 2}]
    assert write_parquet(Path(), "embeddings.jsonl") == []
    finished([])
    assert write_parquet(Path(), "completions.jsonl") == []


class _KilledError(BaseException):
    pass


@pytest.mark.parametrize("step", range(8))
def test_killed_at_any_step_the_file_is_whole_or_not_there(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps: fsyncs, renames and fsyncs of the directory, of the file and of what is recorded of it, and row groups."""
    monkeypatch.setattr(parquet_output, "_ROWS", 2)
    rows = [{"n": n} for n in range(4)]
    finished(rows)
    left = [step]

    def dying(real: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if not left[0]:
                raise _KilledError
            left[0] -= 1
            return real(*arguments, **named)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", dying(os.fsync))
        patch.setattr(Path, "replace", dying(Path.replace))
        patch.setattr(parquet.ParquetWriter, "write_table", dying(parquet.ParquetWriter.write_table))
        with pytest.raises(_KilledError):
            write_parquet(Path(), "completions.jsonl")
    if PATH.exists():
        assert parquet.read_table(PATH).to_pylist() == rows
    write_parquet(Path(), "completions.jsonl")
    assert parquet.read_table(PATH).to_pylist() == rows
    assert write_parquet(Path(), "completions.jsonl") == []


def test_a_full_disk_is_told_and_leaves_no_half_file(monkeypatch: pytest.MonkeyPatch) -> None:
    finished([{"n": 1}])

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(output.os, "fsync", full)
        with pytest.raises(StorageFullError):
            write_parquet(Path(), "completions.jsonl")
    assert not PATH.exists()
    assert write_parquet(Path(), "completions.jsonl") == ["completions.parquet"]
