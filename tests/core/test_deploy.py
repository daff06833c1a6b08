"""The deployment files say what the programs understand: configurations load, commands and options exist."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from rollout.cli.__main__ import app as rollout_app
from rollout.cli.program import command_of
from rollout.config.load import load_settings
from rollout.config.settings import CoordinatorSettings, WorkerSettings
from rollout.model.errors import ConfigError
from rollout_coordinator.__main__ import app as coordinator_app
from rollout_worker.__main__ import app as worker_app

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PROGRAMS = {
    "rollout": command_of(rollout_app, "rollout"),
    "rollout-coordinator": command_of(coordinator_app, "rollout-coordinator"),
    "rollout-worker": command_of(worker_app, "rollout-worker"),
}
MANIFESTS = [
    doc
    for path in sorted((DEPLOY / "kubernetes").rglob("*.yaml"))
    for doc in yaml.safe_load_all(path.read_text())
    if doc
]


def check_command(words: list[str]) -> None:
    """`words` name a program of ours, one of its commands, and options that it has."""
    node: Any = PROGRAMS[Path(words[0]).name]
    rest = words[1:]
    context = None  # of the group above: a group without one keeps the wrong options for help
    while hasattr(node, "get_command"):  # workloads' commands are found when they are asked for
        if node.invoke_without_command and (not rest or rest[0].startswith("-")):
            break
        context = node.make_context(words[0], [], parent=context, resilient_parsing=True)
        found = node.get_command(context, rest[0]) if rest else None
        assert found is not None, f"no such command: {shlex.join(words)}"
        node, rest = found, rest[1:]
    known = {name for param in node.params for name in param.opts}
    unknown = [word for word in rest if word.startswith("--") and word not in known]
    assert not unknown, f"unknown options {unknown} in {shlex.join(words)}"


def commands_in(text: str) -> list[list[str]]:
    """Every call of one of our programs in a shell text or a comment."""
    text = re.sub(r"\\\n[#\s]*", " ", text)
    found = re.findall(r"(?<![\w/.=-])(rollout(?:-coordinator|-worker)? (?!\|)[a-z][^\n;&|`)]*)", text)
    return [shlex.split(call.replace('"', " ").replace("'", " ").replace(",", " ")) for call in found]


@pytest.mark.parametrize(
    ("name", "model"), [("coordinator.toml", CoordinatorSettings), ("worker.toml", WorkerSettings)]
)
def test_compose_configurations_load(name: str, model: Any) -> None:
    environ = {"ROLLOUT_TRANSPORT__ADVERTISE_ADDR": "coordinator:50051"} if name == "coordinator.toml" else {}
    load_settings(model, DEPLOY / name, environ=environ)


def test_kubernetes_configurations_load(tmp_path: Path) -> None:
    maps = [doc["data"] for doc in MANIFESTS if doc["kind"] == "ConfigMap"]
    for name, text in [item for data in maps for item in data.items()]:
        path = tmp_path / name
        path.write_text(text)
        if name == "coordinator.toml":
            load_settings(CoordinatorSettings, path, environ={"ROLLOUT_TRANSPORT__ADVERTISE_ADDR": "a.example:50051"})
        else:
            load_settings(WorkerSettings, path, environ={})
    assert len(maps) == 6


TEXTS = sorted(
    [
        *DEPLOY.rglob("*.*"),
        *(p for p in (DEPLOY.parent / "docs").glob("*.md") if p.name != "cli.md"),
        DEPLOY.parent / "README.md",
    ]
)


def code_in(path: Path) -> str:
    """All of a deployment file; of a document what is marked as code."""
    text = path.read_text()
    if path.suffix != ".md":
        return text
    fences = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    return "\n".join([*fences, *re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))])


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: p.name)
def test_commands_exist(path: Path) -> None:
    text = code_in(path)
    of_examples = set(re.findall(r'^(\w+) = "[\w.]+:\w+"$', text, re.MULTILINE))  # workloads that the page registers
    for words in commands_in(text):
        if Path(words[0]).name in PROGRAMS and len(words) > 1 and words[1] not in of_examples:
            check_command(words)


def test_containers_run_known_commands() -> None:
    def containers(node: Any) -> list[dict[str, Any]]:
        if isinstance(node, list):
            return [c for child in node for c in containers(child)]
        if not isinstance(node, dict):
            return []
        own = [*node.get("containers", []), *node.get("initContainers", [])]
        return own + [c for child in node.values() for c in containers(child)]

    calls = [c["args"] for doc in MANIFESTS for c in containers(doc) if c.get("args")]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    calls += [s["command"] for s in compose.values() if s.get("command") and s["command"][0] != "sh"]
    assert calls
    for call in calls:
        check_command(call)


@pytest.mark.parametrize("path", sorted((DEPLOY / "systemd").glob("*.service")), ids=lambda p: p.name)
def test_units_drain_before_they_are_killed(path: Path) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(path.read_text())
    assert set(unit.sections()) == {"Unit", "Service", "Install"}
    service = unit["Service"]
    check_command(shlex.split(service["ExecStart"]))
    assert service["KillSignal"] == "SIGTERM"
    if "worker" in path.name:
        assert int(service["TimeoutStopSec"]) > WorkerSettings().worker.drain_budget_s
        assert service["KillMode"] == "mixed"


def test_pods_are_given_longer_than_a_drain_takes() -> None:
    """And those on spot nodes no longer than the cloud leaves them: AWS 120 s, GKE 15 of its 30."""
    for directory, most in (("", 3600), ("eks", 120), ("gke", 15)):
        found = [
            doc
            for path in sorted((DEPLOY / "kubernetes" / directory).glob("2*.yaml"))
            for doc in yaml.safe_load_all(path.read_text())
        ]
        pod = next(doc["spec"]["template"]["spec"] for doc in found if doc["kind"] == "Deployment")
        (budget,) = re.findall(r"drain_budget_s = (\d+)", next(d["data"]["worker.toml"] for d in found if "data" in d))
        assert int(budget) < pod["terminationGracePeriodSeconds"] <= most
        (container,) = pod["containers"]
        assert bool(directory) == ("preStop" in container.get("lifecycle", {}))


def test_an_address_nobody_can_dial_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.toml"
    path.write_text('[transport]\nlisten_addr = "0.0.0.0:50051"\njoin_addr = "0.0.0.0:50052"\n')
    with pytest.raises(ConfigError, match=r"set transport\.advertise_addr"):
        load_settings(CoordinatorSettings, path, environ={})
