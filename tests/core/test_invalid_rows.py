"""Rows that cannot be used: each is in exactly one file, once, under its id, wherever the command was cut off."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout.model.errors import ConfigError
from rollout.model.item import Failure, NewItem, Outcome
from rollout.workloads.collector import Collector
from rollout.workloads.commit import CommitEntry
from rollout.workloads.infer.config import InferConfig
from rollout.workloads.infer.payload import ChoiceResult, RowResult, encode_result
from rollout.workloads.infer.workload import Infer, InferChecked
from rollout.workloads.invalid import INVALID, invalid_of
from rollout.workloads.json_form import JsonObject
from rollout.workloads.output import OutputDirectory
from rollout.workloads.port import InputReader
from rollout.workloads.resume import describe_changes

INFER = Infer()
RUN = "01J00000000000000000000000"
GOOD = ('{"prompt": "p"}', '{"messages": [{"role": "user", "content": "c"}], "x": 1}')
BAD = (
    "no",
    "[]",
    "null",
    '{"prompt": 5}',
    '{"prompt": "a", "prompt": "b"}',
    '{"prompt": "a", "n": 1e999}',
    '"\\ud800"',
)


def config(directory: Path, **input_section: Any) -> InferConfig:
    return InferConfig.model_validate(
        {
            "model": {"uri": "m"},
            "backend": {"kind": "mock"},
            "input": {"glob": str(directory / "in.jsonl"), "on_bad_row": "skip", **input_section},
            "output": {"dir": str(directory / "out"), "openai": True},
        }
    )


def check(found: InferConfig) -> InferChecked:
    return INFER.check(found, InputReader(exclude=Path(found.output.dir)))


def entry(seq: int, item: NewItem) -> CommitEntry:
    assert isinstance(item.payload, bytes)
    bad = invalid_of(item.payload)
    return CommitEntry(
        position=seq,
        seq=seq,
        attempt=1,
        outcome=Outcome.DONE if bad is None else Outcome.FAILED,
        data=encode_result(RowResult((ChoiceResult("text", "stop", 1),), 1)),
        payload=item.payload,
        id=item.id,
        accepted_ms=1_716_330_669_123,
        duration_ms=1,
        units_in=1,
        units_out=1,
        failure=None if bad is None else Failure(INVALID, bad.fault),
    )


def lines(path: Path) -> Iterator[JsonObject]:
    return map(json.loads, path.read_text("utf-8").splitlines())


@settings(max_examples=30, deadline=None)
@given(rows=st.lists(st.sampled_from(GOOD + BAD), min_size=1, max_size=12), data=st.data())
def test_every_row_is_in_one_file_once_wherever_it_was_cut(rows: list[str], data: st.DataObject) -> None:
    rows = [GOOD[0], *rows]
    again, cut = data.draw(st.integers(0, len(rows))), data.draw(st.integers(0, len(rows)))
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        (directory / "in.jsonl").write_text("\n\n".join(rows))
        checked = check(config(directory))
        assert checked.report.invalid == sum(row in BAD for row in rows)
        entries = [entry(seq, item) for seq, item in enumerate(INFER.plan(checked, checked.config, 0))]
        assert [item.id for item in INFER.plan(checked, checked.config, again)] == [e.id for e in entries[again:]]

        def collect(name: str, upto: int, spoil: bytes = b"") -> dict[str, bytes]:
            with OutputDirectory.open(directory / name) as out:
                collector = Collector(out, RUN, INFER.writer(checked.config), total=len(rows))
                collector.add(entries[collector.cursor : upto])
                collector.flush()
                assert collector.complete or upto < len(rows)
                assert collector.totals.invalid == sum(row in BAD for row in rows[:upto])
                collector.close()
                with (out.path / "errors.jsonl").open("ab") as file:
                    file.write(spoil)
                return {path.name: path.read_bytes() for path in out.path.glob("*.jsonl")}

        collect("cut", cut, b'{"row": 1')  # killed in the middle of a line
        assert collect("cut", len(rows)) == collect("whole", len(rows))
        errors = list(lines(directory / "whole" / "errors.jsonl"))
        assert [(e["row"], e["line"]) for e in errors] == [
            (i + 1, 2 * i + 1) for i, row in enumerate(rows) if row in BAD
        ]
        assert len(list(lines(directory / "whole" / "completions.jsonl"))) == len(rows) - len(errors)
        assert len({line["custom_id"] for line in lines(directory / "whole" / "openai.jsonl")}) == len(rows)
        checked.close()


@pytest.mark.parametrize(
    ("row", "identity"),
    [
        ('{"custom_id": "c", "body": {"prompt": "p", "user": "a", "user": "b"}}', "c"),
        ('{"custom_id": "c", "body": {"prompt": "p", "n": 1e999}}', "c"),
        ('{"custom_id": "c", "body": {"tools": [], "prompt": "p"}}', "c"),
        ('{"custom_id": NaN, "body": {"prompt": "p"}}', None),
        ('{"custom_id": ["c"], "body": {"prompt": "p"}}', None),
        ('{"custom_id": "c", "body": ', None),
    ],
)
def test_it_keeps_its_custom_id_where_one_can_be_read(tmp_path: Path, row: str, identity: str | None) -> None:
    (tmp_path / "in.jsonl").write_text(f"{row}\n{GOOD[0]}\n")
    checked = check(config(tmp_path))
    item = next(INFER.plan(checked, checked.config, 0))
    written = dict(INFER.writer(checked.config).lines(entry(0, item)))
    checked.close()
    wanted = identity or item.id.hex()
    assert json.loads(written["errors.jsonl"])["id"] == wanted
    assert json.loads(written["openai.jsonl"])["custom_id"] == wanted


def test_one_that_repeats_an_id_does_not_stand_in_the_place_of_the_row_that_has_it(tmp_path: Path) -> None:
    row = '{"custom_id": "c", "body": {"prompt": "p"}}\n'
    (tmp_path / "in.jsonl").write_text(row + row)
    checked = check(config(tmp_path))
    good, bad = (
        dict(INFER.writer(checked.config).lines(entry(seq, item)))
        for seq, item in enumerate(INFER.plan(checked, checked.config, 0))
    )
    checked.close()
    assert json.loads(good["openai.jsonl"])["custom_id"] == "c" == json.loads(bad["errors.jsonl"])["id"]
    assert json.loads(bad["openai.jsonl"])["custom_id"] != "c"


def test_a_run_goes_on_only_with_the_same_rows_left_out(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(f'{{"custom_id": "c", "body": {{"model": "x", "prompt": "p"}}}}\n{GOOD[0]}\n')
    found = [check(config(tmp_path, model_in_rows=value)) for value in ("error", "ignore")]
    for checked in found:
        checked.close()
    one, other = (checked.config for checked in found)
    (change,) = describe_changes(INFER, one, other)
    assert change.startswith("input: 1 of its rows could not be used") and not describe_changes(INFER, one, one)


def test_the_backend_the_model_and_the_rows_are_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("[]\n")
    values = config(tmp_path, on_bad_row="error").model_dump() | {"backend": {"kind": "vlm"}, "model": {"uri": "./no"}}
    with pytest.raises(
        ConfigError,
        match=r'(?s)3 problems:.*backend\.kind: unknown backend "vlm".*model\.uri: .*in\.jsonl:1: .*, not a list',
    ):
        check(InferConfig.model_validate(values))
