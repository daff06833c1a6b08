"""Sandboxes that are pods of a Kubernetes cluster.

Commands run detached under a supervisor in the pod, because an idle exec connection drops, and its end kills nothing.
Pods of dead owners are found by their labels, and each ends by itself after `max_lifetime_secs`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import Field
from rollout.model.errors import ConfigError

from rollout_worker.sandboxes.allowlist import names_among
from rollout_worker.sandboxes.claims import Claim
from rollout_worker.sandboxes.errors import (
    ImagePullError,
    SandboxCreateError,
    SandboxEndedError,
    SandboxError,
    SandboxGoneError,
    SandboxNoRoomError,
    SandboxTeardownError,
)
from rollout_worker.sandboxes.kubernetes_pod import (
    OWNER_LABEL,
    STATE_LABEL,
    PodOptions,
    PodState,
    network_policy,
    pod,
    state_of,
)
from rollout_worker.sandboxes.port import Capabilities, Limits, Price, Spec
from rollout_worker.sandboxes.reach import DroppedError, Reach, Shell
from rollout_worker.sandboxes.remote_probe import CONNECT
from rollout_worker.sandboxes.remote_provider import ServiceProvider
from rollout_worker.sandboxes.remote_sandbox import RemoteSandbox
from rollout_worker.sandboxes.settings import ImageSettings, settings_of

if TYPE_CHECKING:
    from rollout_worker.sandboxes.kubernetes_api import Api

_LOOK_S = (0.2, 2.0)  # first and longest interval between polls of a pod
_CALL_S = 90.0
_GONE_S = 60.0
_CLOSED_S = 30.0


class KubernetesSettings(ImageSettings):
    kubeconfig: str | None = Field(
        default=None, description="A file; default: $KUBECONFIG, the service account of this pod, ~/.kube/config."
    )
    context: str | None = Field(default=None, description="Of the kubeconfig; default: its current one.")
    namespace: str | None = Field(default=None, description="Where pods are made; default: the context's.")
    default_image: str | None = Field(default=None, description="Of tasks that name none, and of what is tried out.")
    max_lifetime_secs: int = Field(default=6 * 3600, ge=60, description="A pod ends itself after that.")
    pending_timeout_secs: float = Field(default=600, gt=0, description="For a pod to be scheduled and to start.")
    labels: dict[str, str] = Field(default_factory=dict[str, str], description="More labels of pods.")
    node_selector: dict[str, str] = Field(default_factory=dict[str, str], description="Of nodes that pods may run on.")
    tolerations: list[dict[str, Any]] = Field(
        default_factory=list[dict[str, Any]], description="Of pods, as in their manifests."
    )
    runtime_class: str | None = Field(default=None, description="Such as gvisor, where the cluster has it.")
    image_pull_secrets: list[str] = Field(default_factory=list[str], description="Names of secrets for the registry.")
    max_sandboxes: int = Field(default=256, ge=1, description="At one time, of one worker.")
    usd_per_cpu_hour: float = Field(default=0, ge=0, description="The price of a processor.")
    usd_per_gib_hour: float = Field(default=0, ge=0, description="The price of a GiB of memory.")


class PodReach(Reach):
    bytes_out = 2 << 20

    def __init__(self, api: Api, name: str) -> None:
        self._api = api
        self._name = name

    async def call(self, script: str, data: bytes) -> bytes:
        from rollout_worker.sandboxes.kubernetes_api import StreamError

        try:
            return await self._api.exec(self._name, script, data, _CALL_S)
        except StreamError as error:
            await self._check(error)
            raise DroppedError(str(error), inside=error.answered) from error

    async def _check(self, error: Exception) -> None:
        """Raise SandboxGoneError if the pod is gone, not only the connection."""
        try:
            found = await self._api.get(self._api.pods, self._name)
        except SandboxError:
            return
        if found is None:
            raise SandboxGoneError(f"pod {self._name} is not there any more") from error
        state = state_of(found)
        if state.what != "ready":
            kind = SandboxEndedError if state.by_itself else SandboxGoneError
            raise kind(f"pod {self._name} is gone: {state.why}") from error


class KubernetesProvider(ServiceProvider):
    name = "kubernetes"
    allowlists = "allowlists hold addresses and blocks, no names"
    closing_faults = (SandboxCreateError,)

    def __init__(self, state: Path, settings: KubernetesSettings) -> None:
        super().__init__(
            state,
            max_sandboxes=settings.max_sandboxes,
            price=Price(settings.usd_per_cpu_hour, settings.usd_per_gib_hour),
            default_image=settings.default_image,
            probed=Limits(0.1, 128, 256, 64),
            opens=_REACHES_API,
        )
        from rollout_worker.sandboxes.kubernetes_api import Api

        self._settings = settings
        self._api = Api(settings.kubeconfig, settings.context, settings.namespace)
        self._options = PodOptions(
            lifetime_s=settings.max_lifetime_secs,
            labels=settings.labels,
            node_selector=settings.node_selector,
            tolerations=settings.tolerations,
            runtime_class=settings.runtime_class,
            pull_secrets=settings.image_pull_secrets,
        )

    async def _connect(self) -> None:
        await super()._connect()
        await self._api.open()

    async def _disconnect(self, *, cleared: bool) -> None:
        await self._api.close()

    async def reap(self) -> None:
        """Also delete pods whose claims were lost with the disk of a host that came back."""
        await super().reap()
        selector = f"{STATE_LABEL}={self._state_id}"
        for path in (self._api.pods, self._api.policies):
            for found in await self._api.list(path, selector):
                meta = found["metadata"]
                if await self._is_dead(meta["labels"].get(OWNER_LABEL, "")):
                    await self._api.delete(path, meta["name"])

    # Capabilities

    def _remarks(self) -> list[str]:
        return ["beyond its storage a pod is evicted, and the sandbox is gone", "the number of processes is the node's"]

    def _refusals(self, spec: Spec) -> list[str]:
        reasons = super()._refusals(spec)
        if spec.network.mode == "allowlist" and (names := names_among(spec.network.hosts)):
            reasons.append(f"network policies know addresses and blocks, not names: {', '.join(names)}")
        return reasons

    # Making and removing

    async def _start(self, claim: Claim, spec: Spec, found: Capabilities, *, wait: bool) -> RemoteSandbox:
        image = self._image(spec)
        labels = {STATE_LABEL: self._state_id, OWNER_LABEL: self._owner, "app.kubernetes.io/managed-by": "rollout"}
        if spec.network.mode != "public":  # before the pod, so that there is no moment without it
            hosts = spec.network.hosts if spec.network.mode == "allowlist" else ()
            await self._api.create(self._api.policies, network_policy(claim.name, labels, hosts))
        await self._api.create(self._api.pods, pod(claim.name, image, spec.limits, labels, self._options))
        await self._ready(claim.name, image, wait=wait)
        sandbox = await self._enter(claim, spec, found, PodReach(self._api, claim.name))
        if spec.network.mode != "public":
            await self._closed(sandbox.shell, claim.name)
        return sandbox

    async def _ready(self, name: str, image: str, *, wait: bool) -> None:
        until = time.monotonic() + self._settings.pending_timeout_secs
        pause, longest = _LOOK_S
        state = PodState("waiting")
        while time.monotonic() < until:
            found = await self._api.get(self._api.pods, name)
            state = PodState("gone", "it was deleted") if found is None else state_of(found)
            if state.what == "ready":
                return
            if state.what == "pull":
                raise ImagePullError(f"the image {image} cannot be had: {state.why}")
            if state.what in ("broken", "gone"):
                raise SandboxCreateError(f"pod {name} did not start: {state.why}")
            if state.what == "no_room" and not wait:
                raise SandboxNoRoomError(f"no node has room for {name}: {state.why}")
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, longest)
        told = f"after {self._settings.pending_timeout_secs:g} s pod {name} does not run: {state.why}"
        raise SandboxNoRoomError(told) if state.what == "no_room" else SandboxCreateError(told)

    async def _closed(self, shell: Shell, name: str) -> None:
        """Wait until the policy is enforced, which the cluster's network plugin does a while later, or never."""
        until = time.monotonic() + _CLOSED_S
        while True:
            answer = await shell.run(_REACHES_API)
            if answer.code == 77:
                raise SandboxCreateError(f"whether the network of {name} is closed cannot be found out in its image")
            if answer.code != 0:
                return
            if time.monotonic() > until:
                raise SandboxCreateError(
                    f"{name} still reaches the cluster's API server {_CLOSED_S:g} s after a network policy forbade it: "
                    "the cluster's network plugin does not enforce policies"
                )
            await asyncio.sleep(0.5)

    async def _remove(self, claim: Claim) -> None:
        await self._api.delete(self._api.pods, claim.name)
        until = time.monotonic() + _GONE_S
        pause, longest = _LOOK_S
        while await self._api.get(self._api.pods, claim.name) is not None:
            if time.monotonic() > until:
                raise SandboxTeardownError(f"pod {claim.name} is still there {_GONE_S:g} s after it was deleted")
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, longest)
        await self._api.delete(self._api.policies, claim.name)


_REACHES_API = f'{CONNECT}\nconnects "$KUBERNETES_SERVICE_HOST" "${{KUBERNETES_SERVICE_PORT:-443}}"'
"""Script that exits with 0 if it reaches the cluster's API server, as every pod with any network can."""


def open_kubernetes(state: Path, config: Mapping[str, Any] = MappingProxyType({})) -> KubernetesProvider:
    """Return the provider `kubernetes`; use it with `async with`. Raises ConfigError if a setting is wrong or the
    extra is missing."""
    settings = settings_of(KubernetesSettings, config, KubernetesProvider.name)
    if importlib.util.find_spec("kubernetes_asyncio") is None:
        raise ConfigError("the provider kubernetes needs more: pip install 'rollout-engine[kubernetes]'")
    return KubernetesProvider(state, settings)
