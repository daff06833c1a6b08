"""Manifests: what is accepted, and what a person reads when it is not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from rollout.model.errors import ConfigError, PluginError
from rollout.plugins import load_manifest, reward
from rollout.plugins.api import check_result, is_reward

GOOD = """\
name = "sample"
version = "0.1.0"
kind = "env-harness"
trait_id = "rollout_core::Plugin"
mode = "pyo3"
network_allowlist = []

[runtime]
python_min = "3.11"
gpu = false
memory_mib = 64

[entry.pyo3]
module = "sample_inproc.plugin"
factory = "create_plugin"
"""


def load(tmp_path: Path, text: str) -> object:
    (tmp_path / "rollout-plugin.toml").write_text(text)
    return load_manifest(tmp_path)


def test_older_names_are_understood(tmp_path: Path) -> None:
    (tmp_path / "rollout-plugin.toml").write_text(GOOD)
    manifest = load_manifest(tmp_path / "rollout-plugin.toml")
    assert manifest.mode == "python"
    assert manifest.entry.python is not None
    assert manifest.entry.python.factory == "create_plugin"
    assert manifest.directory == tmp_path.resolve()
    rust = GOOD.replace('"pyo3"', '"rust-cdylib"').replace('[entry.pyo3]\nmodule = "sample_inproc.plugin"', "")
    rust = rust.replace('factory = "create_plugin"', '[entry.rust-cdylib]\npath = "lib.so"')
    (tmp_path / "rollout-plugin.toml").write_text(rust)
    assert load_manifest(tmp_path).entry_file == tmp_path.resolve() / "lib.so"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('name = "sample"', 'nmae = "sample"', 'nmae: unknown key; did you mean "name"?'),
        ('name = "sample"', 'name = "My Plugin"', ":1: name: must match"),
        ('version = "0.1.0"', "version = 1", ":2: version: must be"),
        ('"env-harness"', '"env-hraness"', 'did you mean "env-harness"?'),
        ('mode = "pyo3"', 'mode = "wasm"', 'must be "python", "sidecar" or "cdylib"'),
        ('mode = "pyo3"', 'mode = "sidecar"', 'mode = "sidecar" needs a table [entry.sidecar]'),
        ('"3.11"', '"3.9"', "is too old"),
        ("memory_mib = 64", 'memory_mib = "64"', "memory_mib"),
        ('module = "sample_inproc.plugin"', 'module = "a/b.py"', "dotted module name"),
        ("network_allowlist = []", "network_allowlist = [", "not valid TOML"),
        ("network_allowlist = []", 'sha256 = "abc"', "sha256: must match"),
        ("gpu = false", "concurrency = 0", "must be at least 1"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, GOOD.replace(old, new))
    assert words in str(caught.value)
    assert str(tmp_path / "rollout-plugin.toml") in str(caught.value)


def test_missing_manifest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_manifest(tmp_path)


@pytest.mark.parametrize("value", [1, 0.5, None, {"reward": 1.0, "why": "x"}, {"reward": None}, {"other": "x"}])
def test_rewards(value: object) -> None:
    assert check_result("reward", "f", value) == value


@pytest.mark.parametrize("value", [True, "1", [1], math.inf, math.nan, {"reward": "1"}, {"reward": True}])
def test_what_is_no_reward(value: object) -> None:
    with pytest.raises(PluginError, match="must return a finite number, None or a dict"):
        check_result("reward", "f", value)


@pytest.mark.parametrize("value", [None, {}, {"observation": 1}, {"observation": 1, "done": 1}])
def test_what_is_no_step(value: object) -> None:
    with pytest.raises(PluginError, match="step must return"):
        check_result("env-harness", "step", value)


def test_reward_marks() -> None:
    @reward
    def mine() -> float:
        return 1.0

    assert is_reward(mine)
    assert mine() == 1.0
    assert not is_reward(test_reward_marks)
