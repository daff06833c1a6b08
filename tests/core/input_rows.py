"""Rows of input files, opened as a run opens them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollout.workloads.input_format import InputFormat
from rollout.workloads.input_lines import json_of
from rollout.workloads.source import Source


def opened(*patterns: str, **form: Any) -> Source:
    return Source.open(patterns, exclude=Path("out"), form=InputFormat(**form))


def rows(*patterns: str, **form: Any) -> list[tuple[str, Any]]:
    """(place, value) of each row as it is submitted; its bytes say the same."""
    with opened(*patterns, **form) as source:
        source.check(json_of)
        found = list(source.rows())
        assert [json.loads(line.raw) for line in found] == [json_of(line) for line in found]
        return [(line.where, json_of(line)) for line in found]
