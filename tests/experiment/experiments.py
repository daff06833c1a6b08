"""Experiments of the tests, as their files, and as they are resolved."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout.workloads.experiment.config import ExperimentConfig
from rollout.workloads.experiment.resolve import Resolved
from rollout.workloads.experiment.tasks import Task, task_of
from ruamel.yaml import YAML

TASKS = [{"task_id": f"t{number}", "n": number} for number in range(3)]


def definition(**sections: Any) -> dict[str, Any]:
    """experiment.yaml, with `sections` laid over its own."""
    base: dict[str, Any] = {
        "experiment": {"id": "e"},
        "dataset": {"path": "tasks.jsonl"},
        "baseline": {"variant_id": "a"},
        "variant_plan": [{"variant_id": "b", "bindings": {"k": 2}}],
        "runtime": {"command": ["agent"], "policy": {"sandbox": {"mode": "process"}}},
    }
    return {**base, **sections}


def write(directory: Path, tasks: Sequence[Any] = TASKS, **sections: Any) -> Path:
    """The path of the experiment's file, with its data set beside it."""
    directory.mkdir(parents=True, exist_ok=True)
    dataset = directory / "tasks.jsonl"
    dataset.write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    path = directory / "experiment.yaml"
    values = definition(**sections)
    values["dataset"] = {**values["dataset"], "path": str(dataset)}
    with path.open("w") as file:
        YAML(typ="safe").dump(values, file)
    return path


def resolved(tasks: Sequence[Any] = TASKS, **sections: Any) -> Resolved:
    config = ExperimentConfig.model_validate(definition(**sections))
    found: list[Task] = [task_of(json.dumps(task).encode(), config) for task in tasks]
    return Resolved(config, tuple(found), "0" * 64)
