"""Every kind of mistake in a configuration file: where it is, what it is, what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest
from located import places
from rollout.config.load import load_settings
from rollout.config.settings import CoordinatorSettings, WorkerSettings
from rollout.model.errors import ConfigError
from rollout.workloads.infer.config import InferConfig


def load(tmp_path: Path, text: str, model: type = WorkerSettings, **environ: str) -> object:
    path = tmp_path / "c.toml"
    path.write_text(text)
    return load_settings(model, path, environ=environ)


def problem(tmp_path: Path, text: str, model: type = WorkerSettings, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, model, **environ)
    return str(caught.value).replace(str(tmp_path) + "/", "")


def test_a_good_file(tmp_path: Path) -> None:
    found = load(tmp_path, '[worker]\nslots = 3\nlabels = { zone = "a" }\n')
    assert isinstance(found, WorkerSettings)
    assert (found.worker.slots, found.worker.labels) == (3, {"zone": "a"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[worker]\n\nslotz = 3\n", 'c.toml:3: worker.slotz: unknown key; did you mean "slots"?'),
        ("[wroker]\nslots = 1\n", 'c.toml:1: wroker: unknown key; did you mean "worker"?'),
        ("[worker]\nlisten_addr = 'x'\n", "c.toml:2: worker.listen_addr: unknown key here; it belongs in [transport]"),
        ("[worker]\nzzz = 1\n", "c.toml:2: worker.zzz: unknown key; valid keys are slots, executors, roles"),
        ("worker.slots = 'many'\n", 'c.toml:1: worker.slots: must be an integer, not "many"'),
        ("[worker]\nslots = true\n", "c.toml:2: worker.slots: must be an integer, not true"),
        ("[worker]\nslots = 1.5\n", "c.toml:2: worker.slots: must be an integer, not 1.5"),
        ("[worker]\nslots = 0\n", "c.toml:2: worker.slots: must be at least 1, not 0"),
        ("worker = 3\n", "c.toml:1: worker: must be a table"),
        ("[worker]\nroles = 'gpu'\n", 'c.toml:2: worker.roles: must be a list, not "gpu"'),
        (
            "[logging]\nlevel = 'inf'\n",
            'must be "debug", "info", "warning" or "error", not "inf"; did you mean "info"?',
        ),
        ("[transport]\ncluster = 'Not A Name'\n", "c.toml:2: transport.cluster: must match"),
        (
            "[http]\n[transport]\nworker_self_fence_timeout_ms = 6000\n",
            "c.toml:2: transport: worker_self_fence_timeout_ms (6000) must be less than coordinator_failure_timeout_ms",
        ),
        ("[worker\nslots = 1\n", "c.toml:1:"),
        ("[worker]\nslots = \n", "c.toml:2:9: not valid TOML: Invalid value: slots ="),
        ("[worker]\nslots = 1\nslots = 2\n", "c.toml:3:"),
        ("[worker]\nroles = [\n'a',\n", "before the file ends"),
    ],
)
def test_one_mistake(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in problem(tmp_path, text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "lora.toml").touch()
    for name, hint in (("lroa.toml", f"; did you mean {tmp_path}/lora.toml?"), ("nothere.toml", "")):
        with pytest.raises(ConfigError) as error:
            load_settings(WorkerSettings, tmp_path / name, environ={})
        assert error.value.message.endswith(f"no such file{hint}")


def test_every_mistake_is_told_in_order_of_lines(tmp_path: Path) -> None:
    text = "[worker]\nslots = 'x'\nlabels = { a = 1 }\n\n[transport]\nlisten = ''\ntls_dir = 4\n"
    lines = problem(tmp_path, text).split("\n")
    assert lines[0] == "4 problems:"
    assert [line.split(":")[1] for line in lines[1:]] == ["2", "3", "6", "7"]


def test_values_over_several_lines_do_not_shift_places(tmp_path: Path) -> None:
    text = '[worker]\nroles = [\n  "a", # [not.a.table]\n]\nscratch_dir = """\nslots = 1\n"""\nslots = "x"\n'
    assert "c.toml:8: worker.slots" in problem(tmp_path, text)


def test_a_required_key_and_a_missing_section(tmp_path: Path) -> None:
    text = problem(tmp_path, "[model]\n[input]\nglob = 7\n", InferConfig)
    assert "c.toml:1: model.uri: is missing" in text
    assert "c.toml: section [output] " in text and 'dir = "..."' in text
    assert "c.toml:3: input.glob: " in text


def test_an_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_settings(WorkerSettings, tmp_path / "none.toml", environ={})
    with pytest.raises(ConfigError, match="Is a directory"):
        load_settings(WorkerSettings, tmp_path, environ={})
    path = tmp_path / "c.toml"
    path.write_bytes(b"[worker]\n# caf\xe9\n")
    with pytest.raises(ConfigError, match=r"c\.toml:2: not UTF-8"):
        load_settings(WorkerSettings, path, environ={})
    path = tmp_path / "c.yaml"
    path.write_text("worker: 1")
    with pytest.raises(ConfigError, match="TOML, not YAML"):
        load_settings(WorkerSettings, path, environ={})


def test_windows_line_ends_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(b"\xef\xbb\xbf[worker]\r\nslots = 2\r\n")
    assert load_settings(WorkerSettings, path, environ={}).worker.slots == 2


def test_the_environment_overrides(tmp_path: Path) -> None:
    environ = {
        "ROLLOUT_WORKER__SLOTS": "7",
        "ROLLOUT_WORKER__LABELS__ZONE": "b",
        "ROLLOUT_TRANSPORT__COORDINATOR_ADDRS": "a:1, b:2",
        "ROLLOUT_TRANSPORT__TLS_DIR": "123",
        "ROLLOUT_WORKER__DEV_HOT_RELOAD": "true",
        "ROLLOUT_WORKER__ROLES": '["x", "y"]',
        "ROLLOUT_STORAGE__BACKEND": "not ours",
        "ROLLOUT_TRANSPORT": "names no key",
        "ROLLOUT_PLUGINS": "a.toml",
    }
    found = load(tmp_path, "[worker]\nslots = 3\nlabels = { kind = 'a' }\n", WorkerSettings, **environ)
    assert isinstance(found, WorkerSettings)
    assert found.worker.slots == 7
    assert found.worker.labels == {"kind": "a", "zone": "b"}
    assert found.worker.dev_hot_reload is True
    assert found.worker.roles == ["x", "y"]
    assert found.transport.coordinator_addrs == ["a:1", "b:2"]
    assert found.transport.tls_dir == "123"
    assert found.plugins == ["a.toml"]


def test_a_wrong_variable_is_named(tmp_path: Path) -> None:
    text = problem(tmp_path, "", WorkerSettings, ROLLOUT_WORKER__SLOTZ="3", ROLLOUT_HTTP__LISTEN_ADDR="x:1")
    assert places(text) == ["ROLLOUT_WORKER__SLOTZ: worker.slotz"] and '"slots"' in text
    text = problem(tmp_path, "[worker]\nslots = 1\n", WorkerSettings, ROLLOUT_WORKER__SLOTS="many")
    assert places(text) == ["ROLLOUT_WORKER__SLOTS: worker.slots"] and '"many"' in text


def test_the_command_line_overrides_all(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[worker]\nslots = 3\n")
    environ = {"ROLLOUT_WORKER__SLOTS": "4"}
    assert (
        load_settings(WorkerSettings, path, {"worker.slots": 5, "worker.roles": None}, environ=environ).worker.slots
        == 5
    )
    with pytest.raises(ConfigError, match=r"command line: worker\.slots: "):
        load_settings(WorkerSettings, path, {"worker.slots": 0}, environ=environ)


def test_a_secret_is_not_shown(tmp_path: Path) -> None:
    text = problem(tmp_path, "[storage.postgres]\nurl = ['postgres://u:hunter2@h/d']\n", CoordinatorSettings)
    assert "hunter2" not in text
    assert places(text) == ["c.toml:2: storage.postgres.url"]
