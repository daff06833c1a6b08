"""API keys: whose they are, and their limits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rollout.model.errors import ConfigError
from rollout.workloads.serve.errors import ApiError
from rollout.workloads.serve.keys import EVERYBODY, Keys, read_keys


def keys_in(path: Path, tables: object, mode: int = 0o600) -> Keys:
    path.write_text(json.dumps(tables))
    path.chmod(mode)
    return read_keys("KEYS", {"KEYS": str(path)})


def refused(keys: Keys, header: str) -> int:
    with pytest.raises(ApiError) as caught:
        keys.client(header)
    return caught.value.status


def test_without_a_variable_everybody_may_ask() -> None:
    assert read_keys("", {}).client("").name == EVERYBODY


def test_keys_in_the_variable_itself() -> None:
    keys = read_keys("KEYS", {"KEYS": "sk-1, bob=sk-2"})
    assert [keys.client(f"Bearer {key}").name for key in ("sk-1", "sk-2")] == ["key-1", "bob"]
    assert [refused(keys, header) for header in ("", "Bearer sk-3", "Basic sk-1")] == [401, 401, 401]


@pytest.mark.parametrize("text", ["", "/no/such/file.toml"], ids=["unset", "no file"])
def test_a_variable_without_keys_is_a_fault(text: str) -> None:
    with pytest.raises(ConfigError):
        read_keys("KEYS", {"KEYS": text})


@pytest.mark.parametrize("text", ["c2VjcmV0==", "c2VjcmV0=", "c2Vj/mV0", "c2VjcmV0=,b=2", "c2V/cmV0" * 600])
def test_a_key_in_base64_becomes_no_name_and_is_not_quoted(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_keys("KEYS", {"KEYS": text})
    assert "c2V" not in caught.value.message
    assert read_keys("KEYS", {"KEYS": "alice=c2V/cmV0=="}).client("Bearer c2V/cmV0==").name == "alice"


def test_a_name_has_one_key() -> None:
    with pytest.raises(ConfigError):
        read_keys("KEYS", {"KEYS": "alice=sk-1,alice=sk-2"})


@pytest.mark.parametrize("name", ["keys.json", "keys.toml"])
def test_a_file_that_nests_too_deeply_is_a_fault(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(("a = " if name.endswith("toml") else "") + "[" * 100_000)
    with pytest.raises(ConfigError):
        read_keys("KEYS", {"KEYS": str(tmp_path / name)})


def test_every_fault_of_a_file_is_reported_and_no_key_quoted(tmp_path: Path) -> None:
    tables = {"a": {"key": "sk-1"}, "b": {"key": "sk-1"}, "c": {"requests_per_minute": 1}, "d": {"key": "k", "x": 1}}
    with pytest.raises(ConfigError) as caught:
        keys_in(tmp_path / "keys.json", tables)
    lines = caught.value.message
    assert all(part in lines for part in ("a and b", "c.key", "d.x")) and "sk-1" not in lines


def test_a_file_that_others_can_read_is_noted(tmp_path: Path) -> None:
    assert not keys_in(tmp_path / "keys.json", {"a": "sk-1"}).notes
    assert keys_in(tmp_path / "keys.json", {"a": "sk-1"}, 0o644).notes


def test_a_toml_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[alice]\nkey = "sk-1"\nmax_in_flight = 1\n')
    assert read_keys("KEYS", {"KEYS": str(path)}).client("bearer sk-1").max_in_flight == 1


def test_limits_of_requests_tokens_and_at_once(tmp_path: Path) -> None:
    limits = {"requests_per_minute": 2, "tokens_per_minute": 60, "max_in_flight": 1}
    client = keys_in(tmp_path / "keys.json", {"a": {"key": "k", **limits}}).client("Bearer k")

    def wait_s(now: float) -> float | None:
        try:
            client.begin(now)
        except ApiError as error:
            assert error.status == 429
            return error.context["retry_after_s"]
        return None

    assert wait_s(0) is None
    assert wait_s(0) == 1  # one at once
    client.end(61)
    assert wait_s(0) == pytest.approx(2)  # tokens: one too many, and one is needed
    assert wait_s(3) is None
    client.end(0)
    assert wait_s(3) == pytest.approx(30 - 3)  # the second request was used


def test_other_limits_of_a_key_leave_what_is_in_flight(tmp_path: Path) -> None:
    before = keys_in(tmp_path / "keys.json", {"a": {"key": "k", "max_in_flight": 1}})
    before.client("Bearer k").begin(0)
    after = keys_in(tmp_path / "keys.json", {"a": {"key": "new", "max_in_flight": 2}})
    after.succeed(before)
    client = after.client("Bearer new")
    client.begin(0)
    with pytest.raises(ApiError):
        client.begin(0)


def test_an_unknown_key_of_a_file_names_the_one_that_is_meant(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        keys_in(tmp_path / "keys.json", {"a": {"key": "sk-1", "request_per_minute": 1}})
    assert "requests_per_minute" in caught.value.message
