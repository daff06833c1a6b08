"""Results that are no JSON: their form in it, or where the one is that has none."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

import numpy as np
import pytest
from rollout.workloads.map.converted import encode_result


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True, slots=True)
class Point:
    x: Any
    tags: set[str] = field(default_factory=set[str])
    known: ClassVar[int] = 3


ID = "12345678-1234-5678-1234-567812345678"


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (np.int64(3), 3),
        ({"a": [np.float32(0.5), np.bool_(True), np.str_("x")]}, {"a": [0.5, True, "x"]}),
        (np.arange(4, dtype=np.int16).reshape(2, 2), [[0, 1], [2, 3]]),
        (np.array(2.5), 2.5),
        (np.array([np.int8(1), Decimal("0.10")], dtype=object), [1, "0.10"]),
        (np.array(["2026-01-02"], dtype="datetime64[ns]"), ["2026-01-02T00:00:00.000000000"]),
        (np.timedelta64(1500, "ms"), 1.5),
        (datetime(2026, 1, 2, 3, tzinfo=UTC), "2026-01-02T03:00:00+00:00"),
        ((date(2026, 1, 2), timedelta(minutes=1)), ["2026-01-02", 60.0]),
        ([Decimal("1.50"), UUID(ID), Path("a/b"), Colour.RED], ["1.50", ID, "a/b", "red"]),
        ({3, 1, 2}, [1, 2, 3]),
        (frozenset({"b", 1}), ["b", 1]),
        (Point(np.float64(1.0), {"b", "a"}), {"x": 1.0, "tags": ["a", "b"]}),
    ],
)
def test_what_has_an_obvious_form(value: Any, form: Any) -> None:
    assert json.loads(encode_result(value)) == form


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": np.array([1.0, np.nan])}, "result['a'][1] is nan"),
        ([np.datetime64("NaT", "s")], "result[0] is nan"),
        ([Point({"b": object()})], "result[0].x['b'] is an object"),
        ({"a": {np.int64(1): 2}}, "result['a'] has the key"),
        (np.array([1j]), "result[0] is a complex"),
        (Point, "result is a type"),
    ],
)
def test_what_has_none_is_named_with_its_place(value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=r"^result") as caught:
        encode_result(value)
    assert str(caught.value).startswith(said)


def test_what_contains_itself_ends() -> None:
    loop: list[Any] = [np.int8(1)]
    loop.append(loop)
    with pytest.raises(ValueError, match="contains itself"):
        encode_result(loop)
