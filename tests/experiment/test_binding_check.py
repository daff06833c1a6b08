"""Which bindings a function takes, as its source says."""

from __future__ import annotations

import ast

import pytest
from rollout.workloads.experiment.binding_check import binding_faults, parameters_of
from rollout.workloads.experiment.config import VariantKeys


@pytest.mark.parametrize(
    ("source", "bindings", "keys"),
    [
        ("def f(row, model='small', *, depth=1): ...", {"model": "a", "depth": 2}, []),
        ("def f(row, model='small'): ...", {"modle": "a"}, ["baseline.bindings.modle"]),
        ("def f(row, **settings): ...", {"anything": 1}, []),
        ("def f(*rows, model): ...", {"model": 1}, []),
        ("def f(row, model): ...", {}, ["baseline.bindings"]),
        ("def f(row, *, model): ...", {"modle": 1}, ["baseline.bindings.modle", "baseline.bindings"]),
        ("def f(row, model, /): ...", {"model": 1}, ["baseline.bindings.model"]),
        ("def f(): ...", {}, ["runtime.function"]),
        ("async def f(row): ...", {"model": 1}, ["baseline.bindings.model"]),
        ("class F:\n  def __call__(self, row, model=1): ...", {"model": 1, "self": 2}, ["baseline.bindings.self"]),
        ("class F(Base): ...", {"anything": 1}, None),
        ("@wraps\ndef f(row): ...", {"anything": 1}, None),
        ("f = make()", {"anything": 1}, None),
    ],
)
def test_bindings_are_compared_with_the_parameters(
    source: str, bindings: dict[str, object], keys: list[str] | None
) -> None:
    found = parameters_of(ast.parse(source).body[0])
    if found is None or keys is None:
        assert found is keys
        return
    faults = binding_faults("f", "f.py:1", found, [VariantKeys(variant_id="a", bindings=bindings)])
    assert [fault.partition(": ")[0] for fault in faults] == keys
