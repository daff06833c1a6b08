"""What a program may give as a function, what a function may have beside the row, and what people are told to write
instead."""

from __future__ import annotations

import json
import operator
import os
import pickle
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rollout.model.errors import ConfigError
from rollout.workloads.code import find_code
from rollout.workloads.map.call import Call
from rollout.workloads.map.client.cluster import Outcome, RowFailed
from rollout.workloads.map.client.function import resolve
from rollout.workloads.map.config import FunctionSection, RunSection
from rollout.workloads.map.failure import RowError
from rollout.workloads.map.plan import Planner, run_config

HERE = Path(__file__).parent
MODULE = """
def plain(row): ...
def scaled(row, factor, floor=0.0): ...
async def asked(row, *, model): ...
class Made:
    def __init__(self, model, limit=3): ...
    def __call__(self, row): ...
class Bare:
    def __call__(self, row): ...
"""


def scale(row: float, factor: float, floor: float = 0.0) -> float:
    return max(row * factor, floor)


class Scorer:
    def __init__(self, model: str) -> None:
        self.model = model

    def __call__(self, row: Any) -> None: ...

    def score(self, row: Any) -> None: ...


@dataclass
class Scaled:
    factor: float
    floor: float = 0.0

    def __call__(self, row: float) -> float:
        return row * self.factor


@pytest.mark.parametrize(
    ("function", "options", "call"),
    [
        (scale, {"args": [2]}, Call("scale", (), [2])),
        (partial(scale, floor=1), {"kwargs": {"factor": 2}}, Call("scale", [], [], {"floor": 1, "factor": 2})),
        (partial(partial(scale, 1), 2), {"args": [3]}, Call("scale", [1, 2], [3])),
        (partial(Scorer, "small"), {}, Call("Scorer", (), ["small"])),
        (Scorer, {"kwargs": {"model": "small"}}, Call("Scorer", (), [], {"model": "small"})),
        (Scaled(2.0), {}, Call("Scaled", (), [], {"factor": 2.0, "floor": 0.0})),
    ],
)
def test_functions_with_arguments(function: Any, options: dict[str, Any], call: Call) -> None:
    found, directory = resolve(function, None, **options)
    assert directory == HERE
    assert (found.function, found.arguments()) == (f"{__name__}:{call.function}", call.arguments())


def test_an_outcome_gives_its_result_or_raises() -> None:
    assert Outcome(1, 2, None, 1, 0.0).unwrap() == 2
    error = RowError("exception", "ValueError", "bad", 'File "f.py", line 1')
    with pytest.raises(RowFailed, match=r"row 3: ValueError: bad(.|\n)*f\.py") as caught:
        Outcome(3, None, error, 1, 0.0).unwrap()
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.row, copy.error, str(copy)) == (3, error, str(caught.value))


def test_functions_that_workers_could_not_import() -> None:
    def nested(row: Any) -> None: ...

    wrong: list[tuple[Any, str]] = [
        (lambda row: row, "a lambda.*args or kwargs"),
        (nested, "inside a function"),
        ([], "cannot be sent"),
        (partial(nested, 1), "inside a function"),
        (Scorer("small"), r"kwargs=\{\.\.\.\}; or make the class a dataclass"),
        (Scorer("small").score, "a method of an object"),
        (partial(Scaled(1.0), 2), "made already"),
    ]
    for function, said in wrong:
        with pytest.raises(ConfigError, match=said):
            resolve(function, None)
    with pytest.raises(ConfigError, match="args must be a list"):
        resolve(scale, None, args="ab")
    assert resolve(scale, None)[1] == HERE
    for function in (json.dumps, os.path.join, pytest.approx, RowError, operator.add):  # Python's, a package's, ours
        assert resolve(function, None)[1] is None, function


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (Call("m:f", args=[1, {2}]), r"args\[1\] is a set.*travel as JSON"),
        (Call("m:f", kwargs={"a": {"b": object()}}), r"kwargs\['a'\]\['b'\] is an object"),
        (Call("m:f", kwargs={"a": "x" * 100_000}), "64 KiB is the most"),
    ],
)
def test_arguments_that_do_not_travel(call: Call, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        call.arguments()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (Call("module:scaled", args=[2]), ""),
        (Call("module:scaled", [2], [], {"floor": 1}), ""),
        (Call("module:asked", kwargs={"model": "m"}, per_process=8), ""),
        (Call("module:Made", args=["m"], kwargs={"limit": 1}), ""),
        (Call("module:scaled"), "module.py:3: scaled must take one argument"),
        (Call("module:scaled", kwargs={"floor": 1}), "module.py:3: .*missing a required argument: 'factor'"),
        (Call("module:plain", args=[2]), "module.py:2: .*too many positional arguments"),
        (Call("module:asked", kwargs={"model": 1, "modell": 2}), "unexpected keyword argument 'modell'"),
        (Call("module:Made"), "module.py:5: class Made cannot be made.*'model'"),
        (Call("module:plain", per_process=2), "module.py:2: plain is no `async def`"),
        (Call("module:Bare", per_process=2), "Bare is no `async def`"),
    ],
)
def test_the_definition_is_compared_with_the_arguments(tmp_path: Path, call: Call, said: str) -> None:
    (tmp_path / "module.py").write_text(MODULE)
    if not said:
        assert find_code(call.function, tmp_path, check=call.check)
        return
    with pytest.raises(ConfigError, match=said):
        find_code(call.function, tmp_path, check=call.check)


def test_arguments_are_part_of_what_a_row_is_and_come_from_the_command_line_as_json() -> None:
    section = FunctionSection.model_validate({"name": "m:f", "args": "[1]", "kwargs": '{"a": 2}'})
    configs = [run_config(Call("m:f", (), args), "ab", RunSection()) for args in ([], section.args, [2])]
    assert len({Planner(config).item(0, b"1").id for config in configs}) == 3
    with pytest.raises(ValueError, match="must be JSON"):
        FunctionSection.model_validate({"name": "m:f", "kwargs": "a=2"})
