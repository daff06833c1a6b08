"""Pods as sandboxes: manifests for the API server, and the meaning of its answers. Plain values, nothing is called."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from rollout_worker.sandboxes.port import Limits

CONTAINER = "sandbox"
STATE_LABEL, OWNER_LABEL, NAME_LABEL = "rollout/state", "rollout/owner", "rollout/sandbox"
_WAIT = "trap '' TERM; while :; do sleep 3600 & wait; done"
"""The first process, which only reaps orphans."""

_PULL = ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
_BROKEN = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CrashLoopBackOff")

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PodOptions:
    """The provider's settings that go into every pod."""

    lifetime_s: int
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    node_selector: Mapping[str, str] = field(default_factory=dict[str, str])
    tolerations: Sequence[Json] = ()
    runtime_class: str | None = None
    pull_secrets: Sequence[str] = ()


def pod(name: str, image: str, limits: Limits, labels: Mapping[str, str], options: PodOptions) -> dict[str, Any]:
    """Return the manifest. The pod ends itself after `lifetime_s`, even if forgotten; it has no token for the API."""
    amounts = {
        "cpu": f"{round(limits.cpus * 1000)}m",
        "memory": f"{limits.memory_mb}Mi",
        "ephemeral-storage": f"{limits.storage_mb}Mi",
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": options.lifetime_s,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 0,
        "containers": [
            {
                "name": CONTAINER,
                "image": image,
                "command": ["/bin/sh", "-c", _WAIT],
                "resources": {"limits": amounts, "requests": amounts},
            }
        ],
    }
    if options.node_selector:
        spec["nodeSelector"] = dict(options.node_selector)
    if options.tolerations:
        spec["tolerations"] = list(options.tolerations)
    if options.runtime_class is not None:
        spec["runtimeClassName"] = options.runtime_class
    if options.pull_secrets:
        spec["imagePullSecrets"] = [{"name": secret} for secret in options.pull_secrets]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {**options.labels, **labels, NAME_LABEL: name}},
        "spec": spec,
    }


def network_policy(name: str, labels: Mapping[str, str], hosts: Sequence[str]) -> dict[str, Any]:
    """Return a policy that forbids all traffic but egress to `hosts`, addresses and CIDR blocks."""
    out = [{"to": [{"ipBlock": {"cidr": str(ipaddress.ip_network(host, strict=False))}} for host in hosts]}]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "labels": dict(labels)},
        "spec": {
            "podSelector": {"matchLabels": {NAME_LABEL: name}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [],
            "egress": out if hosts else [],
        },
    }


@dataclass(frozen=True, slots=True)
class PodState:
    """`waiting`: not started yet; `no_room`: no node has room at present; `pull`: the image cannot be pulled; `broken`:
    it does not start; `gone`: it has ended; `by_itself`: what ran in it ended it."""

    what: Literal["ready", "waiting", "no_room", "pull", "broken", "gone"]
    why: str = ""
    by_itself: bool = False


def _by_itself(status: Json, ended: Json) -> bool:
    """Return whether what ran in an ended pod ended it. Without a reason of its own, its container did. A pod is
    evicted for its own storage, or because its node has little."""
    reason, message = status.get("reason"), str(status.get("message", ""))
    if reason == "Evicted":
        return "exceed" in message and "limit" in message
    return reason == "DeadlineExceeded" or (reason is None and ended.get("reason") != "ContainerStatusUnknown")


def state_of(pod: Json) -> PodState:
    """Return the state of a pod, as the API server gives it."""
    status = cast("Json", pod.get("status") or {})
    phase = status.get("phase", "Pending")
    conditions = {c["type"]: c for c in cast("list[Json]", status.get("conditions") or [])}
    containers = cast("list[Json]", status.get("containerStatuses") or [])
    first: Json = containers[0] if containers else {}
    container = cast("Json", first.get("state") or {})
    if phase in ("Failed", "Succeeded"):
        ended = cast("Json", container.get("terminated") or {})
        reason = status.get("reason") or ended.get("reason") or phase
        why = ": ".join(str(w) for w in (reason, status.get("message") or ended.get("message")) if w)
        if reason in ("StartError", "ContainerCannotRun"):
            return PodState("broken", f"{why} (sandboxes need /bin/sh in their image)")
        return PodState("gone", why, _by_itself(status, ended))
    if (disruption := conditions.get("DisruptionTarget")) and disruption.get("status") == "True":
        return PodState("gone", f"{disruption.get('reason', 'disrupted')}: {disruption.get('message', '')}")
    if cast("Json", pod["metadata"]).get("deletionTimestamp"):
        return PodState("gone", "it is being deleted")
    if phase == "Running" and "running" in container:
        return PodState("ready")
    waiting = cast("Json", container.get("waiting") or {})
    why = ": ".join(str(w) for w in (waiting.get("reason"), waiting.get("message")) if w)
    if waiting.get("reason") in _PULL:
        return PodState("pull", why)
    if waiting.get("reason") in _BROKEN:
        return PodState("broken", why)
    scheduled = conditions.get("PodScheduled")
    if scheduled and scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        return PodState("no_room", str(scheduled.get("message", "")))
    return PodState("waiting", why or str(phase))
