"""Configuration files of every program: whatever is in them, a located ConfigError or settings, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fuzz_budget import budget
from hostile_messages import Feed, damage
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel
from rollout.cli.boundary import USAGE, exit_code_of
from rollout.config.load import load_settings, read_values
from rollout.config.settings import CoordinatorSettings, WorkerSettings
from rollout.model.errors import ConfigError
from rollout.plugins.manifest import Manifest
from rollout.workloads.infer.config import InferConfig

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
BATCH = """
[model]
uri = "m"
[input]
glob = ["a.jsonl", "b.jsonl"]
[output]
dir = "o"
[sampling]
temperature = 0.5
stop = ["x"]
[backend]
kind = "mock"
"""
PLUGIN = """
name = "p"
version = "1"
kind = "reward"
mode = "sidecar"
network_allowlist = []
[runtime]
concurrency = 2
[entry.sidecar]
command = ["python", "x.py"]
[[examples]]
method = "score"
payload = {a = 1}
"""
FILES: list[tuple[type[BaseModel], str]] = [
    (CoordinatorSettings, (DEPLOY / "coordinator.toml").read_text().replace("0.0.0.0", "127.0.0.1")),
    (WorkerSettings, (DEPLOY / "worker.toml").read_text()),
    (InferConfig, BATCH),
    (Manifest, PLUGIN),
]
LITERALS = (
    "0", "-1", "1", "1e400", "-inf", "nan", "true", '""', '"x"', '"\\u0000"', "[]", "{}", "[[]]", "[{}]", "{a = 1}",
    "1979-05-27", "07:32:00", "1979-05-27T07:32:00Z", "9223372036854775807", "-9223372036854775808", "9" * 40, "0xff",
    '"' + "L" * 5000 + '"', "[1, 'a', []]", '"127.0.0.1:99999"', '":"', '"[::1"', '"\U0001f600:1"', "''' \n '''", "0.5",
)  # fmt: skip


def load(
    directory: Path, kind: type[BaseModel], data: bytes, environ: dict[str, str] | None = None
) -> ConfigError | None:
    path = directory / "c.toml"
    path.write_bytes(data)
    try:
        load_settings(kind, path, environ=environ or {})
    except ConfigError as error:
        assert exit_code_of(error) == USAGE
        assert error.message.splitlines()[0]
        return error
    return None


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config")


def keys_of(kind: type[BaseModel], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name, field in kind.model_fields.items():
        found.append((*prefix, name))
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += keys_of(field.annotation, (*prefix, name))
    return found


@budget(60)
@given(st.sampled_from(FILES), st.binary(min_size=80, max_size=80))
@example((InferConfig, "a = " + "[" * 5000), bytes(80))
@example((InferConfig, "a" + ".a" * 5000 + " = 1"), bytes(80))
@example((InferConfig, "a = " + "{a=" * 5000), bytes(80))
@example((InferConfig, "a = " + "9" * 5000), bytes(80))
def test_damaged_files(directory: Path, file: tuple[type[BaseModel], str], data: bytes) -> None:
    feed = Feed(data)
    body = file[1].encode()
    for _ in range(1 + feed.below(3)):
        body = damage(feed, body)
    error = load(directory, file[0], body)
    if error is not None:
        assert str(directory / "c.toml") in error.message


@budget(100)
@given(st.sampled_from(FILES), st.integers(0, 10_000), st.sampled_from(LITERALS))
def test_any_key_with_any_value(directory: Path, file: tuple[type[BaseModel], str], at: int, literal: str) -> None:
    """The rest of the file is valid, so what is wrong is this key, and the message says so."""
    kind, text = file
    keys = keys_of(kind)
    key = keys[at % len(keys)]
    path = directory / "c.toml"
    path.write_text(text)
    values = read_values(path)[0]
    table: dict[str, Any] = values
    for part in key[:-1]:
        inner = table.get(part)
        if not isinstance(inner, dict):
            inner = table[part] = {}
        table = inner
    table[key[-1]] = Raw(literal)
    error = load(directory, kind, toml(values).encode())
    if error is not None:
        assert key[-1] in error.message or key[0] in error.message, error.message


class Raw(str):
    """A TOML literal as it is written."""


def toml(values: Any) -> str:
    """Everything inline: each line is one key of the top level."""
    return "\n".join(f"{json.dumps(key)} = {inline(value)}" for key, value in values.items())


def inline(value: Any) -> str:
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {inline(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(inline, value)) + "]"
    return json.dumps(value)


names = st.sampled_from([".".join(key) for kind, _ in FILES[:2] for key in keys_of(kind)])


@budget(60)
@given(st.sampled_from(FILES[:2]), names, st.one_of(st.sampled_from(LITERALS), st.text(max_size=20)))
@example(FILES[1], "worker.capacity", "[" * 5000)
@example(FILES[1], "worker.slots", "9" * 5000)
def test_any_variable_with_any_value(directory: Path, file: tuple[type[BaseModel], str], name: str, value: str) -> None:
    variable = "ROLLOUT_" + name.upper().replace(".", "__")
    error = load(directory, file[0], file[1].encode(), {variable: value})
    if error is not None:
        assert variable in error.message or name.split(".")[-1] in error.message, error.message
