"""The tasks of an experiment, a JSONL file with a task per line. `Task` has what the runner reads; the agent gets the
whole row."""

from __future__ import annotations

from typing import Any, cast

from pydantic import ConfigDict, Field, ValidationError

from rollout.config.section import Section
from rollout.model.errors import InputError
from rollout.workloads.experiment.config import ExperimentConfig
from rollout.workloads.experiment.contracts import TaskId, WorkspacePath, faults_in
from rollout.workloads.input_lines import Line
from rollout.workloads.json_form import JsonObject, parse_json
from rollout.workloads.port import InputReader


class Task(Section):
    """A task. `image` and `workspace` apply if the experiment's image_source is per_task. `row` is the whole line."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    task_id: TaskId
    image: str | None = Field(default=None, min_length=1)
    workspace: WorkspacePath | None = None
    row: JsonObject


def read_tasks(config: ExperimentConfig, reading: InputReader) -> tuple[list[Task], str]:
    """Return the first `dataset.limit` tasks and the digest of their rows. Raises InputError with all faults."""
    tasks: list[Task] = []
    seen: dict[str, str] = {}
    limit = config.dataset.limit

    def read(line: Line) -> None:
        if limit is not None and line.index >= limit:
            return
        try:
            task = task_of(line.raw, config)
        except InputError as error:
            raise InputError(f"{line.where}: {error.message}") from None
        first = seen.setdefault(task.task_id, line.where)
        if first != line.where:
            raise InputError(f'{line.where}: task_id: "{task.task_id}" stands in {first}, too')
        tasks.append(task)

    source, report = reading.rows([config.dataset.path], read, skip=None, key="dataset.path")
    source.close()
    if not tasks:
        raise InputError(f"dataset.path: {config.dataset.path} holds no task")
    return tasks, report.digest


def task_of(raw: bytes, config: ExperimentConfig) -> Task:
    """Parse a line. Raises InputError if it is not a task of such an experiment."""
    try:
        value = parse_json(raw)
    except ValueError as error:
        raise InputError(str(error)) from None
    if not isinstance(value, dict):
        raise InputError("a task must be an object with task_id")
    row = cast("dict[str, Any]", value)
    known = {key: row[key] for key in ("task_id", "image", "workspace") if key in row}
    try:
        task = Task.model_validate({**(known if config.is_per_task else _no_image(known)), "row": row}, strict=True)
    except ValidationError as error:
        raise InputError("; ".join(faults_in(error))) from None
    if config.is_per_task and task.image is None:
        raise InputError("image: is missing, and image_source: per_task needs one of each task")
    return task


def _no_image(known: JsonObject) -> JsonObject:
    """Remove keys that belong to the task alone because the experiment names the images."""
    return {key: value for key, value in known.items() if key == "task_id"}
