"""The input of `infer` for tests: checked, and planned, as the command does it."""

from __future__ import annotations

from pathlib import Path

from rollout.model.item import NewItem
from rollout.workloads.infer import rows
from rollout.workloads.infer.config import InferConfig
from rollout.workloads.infer.plan import plan
from rollout.workloads.port import InputReader
from rollout.workloads.source import InputReport


def check_input(config: InferConfig) -> InputReport:
    found = rows.check_input(config, InputReader(exclude=Path(config.output.dir)))
    found.close()
    return found.report


def planned(config: InferConfig, model_content_id: str, *, start: int = 0) -> list[NewItem]:
    source = rows.check_input(config, InputReader(exclude=Path(config.output.dir))).source
    assert source is not None
    with source:
        return list(plan(config, model_content_id, source.rows(start)))
