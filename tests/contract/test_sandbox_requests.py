"""What providers of sandboxes elsewhere ask for, and how answers are read: no sandbox is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from located import places
from rollout.model.errors import ConfigError
from rollout_worker.sandboxes.command import CommandSettings
from rollout_worker.sandboxes.kubernetes import KubernetesSettings
from rollout_worker.sandboxes.kubernetes_pod import PodOptions, pod, state_of
from rollout_worker.sandboxes.modal import ModalSettings
from rollout_worker.sandboxes.port import Limits
from rollout_worker.sandboxes.providers import open_provider
from rollout_worker.sandboxes.settings import Settings
from rollout_worker.sandboxes.templates import check_template, filled, words


def test_templates_are_checked_all_at_once(tmp_path: Path) -> None:
    config = {
        "exec_command": "run {sandbox} '{command}'",
        "destroy_command": "rm",
        "create_comand": "x",
        "max_sandboxes": 0,
    }
    with pytest.raises(ConfigError) as caught:
        open_provider("command", tmp_path, config)
    message = str(caught.value)
    assert sorted(places(message)) == [
        "provider_config.create_comand",
        "provider_config.create_command",
        "provider_config.destroy_command",
        "provider_config.exec_command",
        "provider_config.max_sandboxes",
    ]
    assert all(named in message for named in ("{sandbox_id} is missing", "{sandbox};", "{command} is filled in"))


@pytest.mark.parametrize("text", ["x ${HOME} {image}", "docker inspect -f '{{.Id}}' {image}", "{ echo {image}; }"])
def test_braces_of_others_are_no_placeholders(text: str) -> None:
    assert check_template(text, ("image",), ("image",)) == text
    assert filled(text, words({"image": "a b"})) == text.replace("{image}", "'a b'")


def test_a_pod_ends_itself_and_may_nothing() -> None:
    made = pod("p", "debian:12", Limits(1.5, 512, 1024, 64), {"a": "b"}, PodOptions(lifetime_s=3600))
    spec = made["spec"]
    assert (spec["restartPolicy"], spec["activeDeadlineSeconds"], spec["automountServiceAccountToken"]) == (
        "Never",
        3600,
        False,
    )
    amounts = {"cpu": "1500m", "memory": "512Mi", "ephemeral-storage": "1024Mi"}
    assert spec["containers"][0]["resources"] == {"limits": amounts, "requests": amounts}


def container(kind: str, **details: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"state": {kind: details}}]}


def condition(kind: str, status: str, **details: str) -> dict[str, Any]:
    return {"conditions": [{"type": kind, "status": status, **details}]}


@pytest.mark.parametrize(
    ("status", "what", "why"),
    [
        ({}, "waiting", "Pending"),
        ({"phase": "Running", **container("running")}, "ready", ""),
        ({"phase": "Running", **container("waiting")}, "waiting", "Running"),
        (container("waiting", reason="ErrImagePull", message="429"), "waiting", "ErrImagePull: 429"),
        (container("waiting", reason="ImagePullBackOff", message="x"), "pull", "ImagePullBackOff: x"),
        (container("waiting", reason="InvalidImageName"), "pull", "InvalidImageName"),
        (container("waiting", reason="CreateContainerError", message="m"), "broken", "CreateContainerError: m"),
        (condition("PodScheduled", "False", reason="Unschedulable", message="0/3"), "no_room", "0/3"),
        ({"phase": "Failed", "reason": "DeadlineExceeded"}, "gone", "DeadlineExceeded"),
        ({"phase": "Failed", **container("terminated", reason="OOMKilled")}, "gone", "OOMKilled"),
        (
            {"phase": "Failed", **container("terminated", reason="StartError", message="no sh")},
            "broken",
            "StartError: no sh",
        ),
        (
            {"phase": "Running", **condition("DisruptionTarget", "True", reason="PreemptionByScheduler", message="m")},
            "gone",
            "PreemptionByScheduler: m",
        ),
    ],
)
def test_what_a_pod_is(status: dict[str, Any], what: str, why: str) -> None:
    found = state_of({"metadata": {}, "status": status})
    assert (found.what, found.why[: len(why)]) == (what, why)


@pytest.mark.parametrize(
    ("status", "by_itself"),
    [
        (container("terminated", reason="OOMKilled"), True),
        (container("terminated", reason="Error", exitCode=1), True),
        ({"reason": "DeadlineExceeded"}, True),
        ({"reason": "Evicted", "message": "Container sandbox exceeded its local ephemeral storage limit"}, True),
        ({"reason": "Evicted", "message": "The node was low on resource: memory."}, False),
        ({"reason": "NodeShutdown"}, False),
        (container("terminated", reason="ContainerStatusUnknown"), False),
    ],
)
def test_whether_a_pod_ended_by_what_ran_in_it(status: dict[str, Any], by_itself: bool) -> None:
    assert state_of({"metadata": {}, "status": {"phase": "Failed", **status}}).by_itself is by_itself


@pytest.mark.parametrize("kind", [CommandSettings, KubernetesSettings, ModalSettings])
def test_every_key_is_documented(kind: type[Settings]) -> None:
    name = kind.__name__.removesuffix("Settings").lower()
    page = (Path(__file__).parents[2] / "docs" / "sandboxes.md").read_text()
    section = page.partition(f"### {name}\n")[2].partition("\n##")[0]
    assert [key for key in kind.model_fields if f"`{key}`" not in section] == []
