"""Every key that job.yaml and task.toml know, of a wrong type once: told with its file, its line and its place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
import tomlkit
from job_files import make_task
from pydantic import BaseModel
from rollout.config.load import load_settings
from rollout.model.errors import ConfigError
from rollout.workloads.job.config import JobConfig
from rollout.workloads.job.load_task import load_task
from rollout.workloads.job.task_toml import TaskToml

Place = tuple[str | int, ...]


def keys(model: type[BaseModel], at: Place = ()) -> Iterator[tuple[Place, Any]]:
    """(where, a value of a wrong type) of every key; of a list of tables the keys of its first."""
    for name, field in model.model_fields.items():
        place = (*at, name)
        inner, in_list, table = shape(field.annotation)
        yield place, True if table or in_list or inner else {"no": ["such", "type"]}
        if inner is not None:
            yield from keys(inner, (*place, 0) if in_list else place)


def shape(annotation: Any) -> tuple[type[BaseModel] | None, bool, bool]:
    """(the section that a key holds, whether in a list, whether it is a table of free keys)."""
    if get_origin(annotation) is Annotated:
        return shape(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        found = [shape(one) for one in get_args(annotation)]
        return next((one for one in found if any(one)), (None, False, False))
    if get_origin(annotation) in (list, tuple):
        return shape(get_args(annotation)[0])[0], True, False
    is_section = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_section else None, False, get_origin(annotation) is dict


def document(place: Place, value: Any) -> Any:
    """A document in which `value` alone stands, at `place`."""
    for part in reversed(place):
        value = [value] if part == 0 else {part: value}
    return value


TAKE_TEXT = {"stop", "json_schema"}
"""Of `engine.sampling`: one string stands for a list of one, and for the name of a file."""


def cases(model: type[BaseModel]) -> list[Any]:
    return [
        pytest.param(place, 3 if place[-1] in TAKE_TEXT else wrong, id=".".join(map(str, place)))
        for place, wrong in keys(model)
    ]


def test_the_keys_are_found() -> None:
    """Were they not, the tests below would test nothing."""
    assert len(cases(JobConfig)) > 80
    assert len(cases(TaskToml)) > 150


@pytest.mark.parametrize(("place", "wrong"), cases(JobConfig))
def test_a_key_of_job_yaml(tmp_path: Path, place: Place, wrong: Any) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("# a line before\n" + json.dumps(document(place, wrong)))
    with pytest.raises(ConfigError) as caught:
        load_settings(JobConfig, path, environ={})
    assert f"{path}:2: {'.'.join(map(str, place))}" in str(caught.value)


@pytest.mark.parametrize(("place", "wrong"), cases(TaskToml))
def test_a_key_of_task_toml(tmp_path: Path, place: Place, wrong: Any) -> None:
    task = make_task(tmp_path / "t", "# a line before\n" + tomlkit.dumps(document(place, wrong)))
    with pytest.raises(ConfigError) as caught:
        load_task(task)
    found = str(caught.value)
    assert f"{task}/task.toml:" in found
    assert f": {'.'.join(map(str, place))}" in found
