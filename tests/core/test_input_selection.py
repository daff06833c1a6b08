"""A part of the input: which rows, how they are counted, and that they come out as they were checked."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rollout.model.errors import InputChangedError
from rollout.workloads.input_lines import Line, fail, json_of
from rollout.workloads.input_selection import Selection
from rollout.workloads.json_form import JsonObject
from rollout.workloads.map.config import InputSection
from rollout.workloads.map.workload import Map
from rollout.workloads.port import input_section
from rollout.workloads.resume import describe_changes
from rollout.workloads.source import Source


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, numbers in (("a", range(4)), ("b", range(4, 4)), ("c", range(4, 10))):
        Path(f"{name}.jsonl").write_text("".join(f"{n}\n\n" for n in numbers))
    return tmp_path


def read(selection: Selection, start: int = 0) -> list[tuple[int, Any, str]]:
    """(index, value, place)"""
    with Source.open(["*.jsonl"], exclude=Path("out"), selection=selection) as source:
        report = source.check(json_of)
        found = [(line.index, json.loads(line.raw), line.where) for line in source.rows(start)]
    assert start or len(found) == report.rows == sum(file.rows for file in report.files)
    return found


@pytest.mark.parametrize("limit", [1, 4, 5, 10, 99])
@pytest.mark.usefixtures("place")
def test_the_first_rows(limit: int) -> None:
    found = read(Selection(limit))
    assert [(index, value) for index, value, _ in found] == [(n, n) for n in range(min(limit, 10))]
    assert read(Selection(limit), 3) == found[3:]


@pytest.mark.usefixtures("place")
def test_a_sample_is_in_order_grows_with_its_size_and_depends_on_its_seed() -> None:
    samples = [{value for _, value, _ in read(Selection(sample=n))} for n in range(1, 12)]
    assert all(one < other for one, other in pairwise(samples[:10]))
    assert samples[9] == samples[10] == set(range(10))
    found = read(Selection(sample=5))
    assert [index for index, *_ in found] == list(range(5))
    assert [value for _, value, _ in found] == sorted(value for _, value, _ in found)
    for _, value, where in found:
        assert where == (f"a.jsonl:{2 * value + 1}" if value < 4 else f"c.jsonl:{2 * value - 7}")
    assert read(Selection(sample=5), 2) == found[2:]
    assert len({tuple(value for _, value, _ in read(Selection(sample=5, seed=seed))) for seed in range(5)}) > 1


@pytest.mark.usefixtures("place")
def test_rows_that_are_not_selected_are_not_checked_and_those_that_are_must_not_change() -> None:
    def check(line: Line) -> None:
        if json_of(line) > 4:
            fail(line.file, line.line, "too large")

    with Source.open(["*.jsonl"], exclude=Path("out"), selection=Selection(5)) as source:
        report = source.check(check)
        assert input_section(["*.jsonl"], report)["limit"] == 5
        Path("c.jsonl").write_text("40\n5\n")
        with pytest.raises(InputChangedError, match=r"c\.jsonl:1"):
            list(source.rows())


@pytest.mark.usefixtures("place")
def test_another_part_is_another_run_unless_it_is_the_same_rows() -> None:
    def section(selection: Selection) -> JsonObject:
        with Source.open(["*.jsonl"], exclude=Path("out"), selection=selection) as source:
            return {"input": input_section(["*.jsonl"], source.check(json_of))}

    first = section(Selection(4))
    assert describe_changes(Map(), first, section(Selection(5))) == ["input.limit: 4 -> 5"]
    changes = describe_changes(Map(), first, section(Selection(sample=4)))
    assert [change.partition(":")[0] for change in changes] == ["input.limit", "input.sample", "input.sample_seed"]
    assert describe_changes(Map(), section(Selection(10)), section(Selection(99))) == []


def test_limit_and_sample_exclude_each_other_and_are_of_files() -> None:
    for wrong in ({"glob": "x", "limit": 1, "sample": 1}, {"queue": True, "limit": 1}):
        with pytest.raises(ValueError, match="remove"):
            InputSection.model_validate(wrong)
