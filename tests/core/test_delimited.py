"""CSV and TSV as input: rows of strings, and every fault with its place."""

from __future__ import annotations

import csv
import gzip
import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from input_rows import opened, rows
from rollout.model.errors import InputChangedError, InputError
from rollout.workloads.input_files import InputFile
from rollout.workloads.input_format import InputFormat
from rollout.workloads.input_lines import json_of


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def faults(*patterns: str, skip: bool = False, **form: Any) -> list[str]:
    with pytest.raises(InputError) as error:
        opened(*patterns, **form).check(json_of, skip=skip)
    head, *lines = error.value.message.split("\n")
    return [line.strip() for line in lines if line.startswith("  ")] or [head]


def test_rows_are_objects_of_strings_without_empty_cells() -> None:
    text = 'id,prompt,note\r\n1,"a ""b"", c",\r\n\r\n2,"two\nlines",é\r\n3,x,y'
    Path("a.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert rows("a.csv") == [
        ("a.csv:2", {"id": "1", "prompt": 'a "b", c'}),
        ("a.csv:4", {"id": "2", "prompt": "two\nlines", "note": "é"}),
        ("a.csv:6", {"id": "3", "prompt": "x", "note": "y"}),
    ]


def test_the_name_says_the_format_also_of_a_packed_file_unless_it_is_set() -> None:
    Path("a.tsv.gz").write_bytes(gzip.compress(b"p\tq\n1,5\t2\n"))
    Path("b.CSV").write_text("p\n3\n")
    Path("c").write_text('{"p": 4}\n')
    Path("d").write_text("p\n5\n")
    assert [value for _, value in rows("a.tsv.gz", "b.CSV", "c")] == [{"p": "1,5", "q": "2"}, {"p": "3"}, {"p": 4}]
    assert rows("d", kind="csv") == [("d:2", {"p": "5"})]


def test_columns_become_keys() -> None:
    Path("a.csv").write_text("question,id\nWhy?,1\n")
    Path("b.jsonl").write_text('{"question": "Who?", "n": 1}\n{"n": 2}\n')
    assert [value for _, value in rows("a.csv", "b.jsonl", columns={"question": "prompt"})] == [
        {"prompt": "Why?", "id": "1"},
        {"prompt": "Who?", "n": 1},
        {"n": 2},
    ]


def test_faults_of_headers_all_at_once() -> None:
    Path("a.csv").write_text("question,id,id\nx,1,2\n")
    Path("b.csv").write_text("questoin,prompt\nx,1\n")
    Path("c.csv").write_text("question,prompt\nx,1\n")
    Path("d.csv").write_bytes("question\nx".encode("utf-16"))
    Path("e.jsonl").write_text('{"question": 1, "prompt": 2}\n')
    found = faults("[a-e].*", columns={"question": "prompt"})
    assert [fault.split(": ")[0] for fault in found] == ["a.csv:1", "b.csv:1", "c.csv:1", "d.csv:1", "e.jsonl:1"]
    assert "'id' twice" in found[0] and "did you mean 'questoin'" in found[1]


def test_faults_of_rows_with_the_line_that_each_begins_at() -> None:
    Path("a.csv").write_bytes(b'a,b\n1,"x\ny"\n1\n1,2,3\n1,\xff\n1,"x"y\n1,2\n')
    found = faults("a.csv")
    assert [fault.split(": ")[0] for fault in found] == [f"a.csv:{line}" for line in (4, 5, 6, 7)]
    with opened("a.csv") as source:
        assert source.check(json_of, skip=True).invalid == 4
        lines = list(source.rows())
    assert [(line.line, bool(line.fault)) for line in lines] == [
        (2, False), (4, True), (5, True), (6, True), (7, True), (8, False),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ['a,b\n1,"open\n2,3\n', 'a,b\n1,"open\n2,"x"\n3,4\n'])
def test_a_quote_that_is_not_closed_leaves_no_row_out_in_silence(text: str) -> None:
    Path("a.csv").write_text(text)
    assert [fault.split(": ")[0] for fault in faults("a.csv", skip=True)] == ["a.csv:2"]


def test_a_header_alone_is_no_row() -> None:
    Path("a.csv").write_text("prompt\n")
    with pytest.raises(InputError, match="the input is empty"):
        opened("a.csv").check(json_of)


def test_what_changes_between_the_readings_is_found() -> None:
    Path("a.csv").write_text("p\n1\n2\n")
    with opened("a.csv") as source:
        source.check(json_of)
        Path("a.csv").write_text("p\n1\n3\n")
        with pytest.raises(InputChangedError, match=r"row 2 \(a\.csv:3\) is another"):
            list(source.rows())


_cells = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), max_size=6)


@given(st.lists(st.lists(_cells, min_size=2, max_size=2), max_size=8), st.sampled_from([("csv", ","), ("tsv", "\t")]))
@settings(deadline=None)
def test_what_a_csv_writer_writes_is_read(table: list[list[str]], kind: tuple[Any, str]) -> None:
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=kind[1], lineterminator="\n").writerows([["a", "b"], *table])
    Path("any").write_bytes(text.getvalue().encode())
    found = list(InputFormat(kind[0]).rows(InputFile("any", Path("any"))))
    wanted = [{key: cell for key, cell in zip("ab", row, strict=True) if cell} for row in table]
    assert [(json_of(line), line.fault) for line in found] == [(row, "") for row in wanted]
