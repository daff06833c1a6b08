"""Which test spoils another one by running before it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout.model.errors import InputError
from rollout.workloads.test.bisect import minimal, outcome_after, ran_before
from rollout.workloads.test.cases import Case, CaseResult, Outcome, Try
from rollout.workloads.test.result_lines import Line
from rollout.workloads.test.run_config import GroupConfig


@given(st.integers(1, 60), st.data())
def test_no_less_than_what_it_takes_is_found(count: int, data: st.DataObject) -> None:
    ids = [f"t{n}" for n in range(count)]
    guilty = data.draw(st.sets(st.sampled_from(ids), min_size=1, max_size=3))
    asked: list[Sequence[str]] = []

    def fails(part: Sequence[str]) -> bool:
        asked.append(part)
        return guilty <= set(part)

    assert minimal(ids, fails) == [id for id in ids if id in guilty]
    if len(guilty) == 1:
        assert len(asked) <= 2 * count.bit_length()


def line(id: str, *tries: tuple[Outcome, float, str]) -> Line:
    made = tuple(Try(outcome=outcome, started=at, worker="w", process=process) for outcome, at, process in tries)
    return Line(Case(id=id, group="g"), CaseResult(id=id, group="g", tries=made))


def test_what_ran_before_in_the_same_process() -> None:
    lines = [
        line("c", (Outcome.PASSED, 3.0, "p1")),
        line("a", (Outcome.FAILED, 1.0, "p1"), (Outcome.PASSED, 9.0, "p3")),
        line("b", (Outcome.PASSED, 2.0, "p2")),
        line("x", (Outcome.FAILED, 4.0, "p1"), (Outcome.FAILED, 8.0, "p4")),
        line("d", (Outcome.PASSED, 5.0, "p1")),
    ]
    assert ran_before(lines, "x") == ("g", ["a", "c"])
    for id in ("b", "vanished"):
        with pytest.raises(InputError, match=id):
            ran_before(lines, id)


def test_an_outcome_after_others_in_a_fresh_process(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_a.py").write_text(
        "import os, pytest\nseen = []\n"
        "@pytest.mark.parametrize('n', ['a b', 'x::y'])\ndef test_adds(n): print('-' * 99999); seen.append(n)\n"
        "def test_empty(): assert seen != ['a b', 'x::y'], seen\n"
        "def test_ends(): os._exit(0)\n"
    )
    config = GroupConfig(python=(sys.executable,), options={})
    adds = ["test_a.py::test_adds[a b]", "test_a.py::test_adds[x::y]"]

    def outcome(before: list[str], id: str) -> Outcome | None:
        return outcome_after(before, id, tmp_path, config, {})

    assert outcome(adds, "test_a.py::test_empty") is Outcome.FAILED
    assert outcome(adds[::-1], "test_a.py::test_empty") is Outcome.PASSED
    assert outcome([], "test_a.py::test_ends") is Outcome.CRASHED
    assert outcome(["test_a.py::test_ends"], "test_a.py::test_empty") is None
