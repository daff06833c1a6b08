"""Sandboxes of the Modal service, through its Python client.

Modal's exec reports a timeout as exit code -1 or 137, like other ends. Nothing here relies on that: commands run
detached under our own supervisor, whose status file says how they ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import ipaddress
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import Field
from rollout.model.errors import ConfigError

from rollout_worker.sandboxes.allowlist import names_among
from rollout_worker.sandboxes.claims import Claim
from rollout_worker.sandboxes.errors import (
    ImagePullError,
    SandboxCreateError,
    SandboxEndedError,
    SandboxGoneError,
    SandboxNoRoomError,
    SandboxRefusedError,
    SandboxTeardownError,
)
from rollout_worker.sandboxes.port import Capabilities, Limits, Network, Price, Spec
from rollout_worker.sandboxes.reach import DroppedError, Reach
from rollout_worker.sandboxes.remote_probe import CONNECT
from rollout_worker.sandboxes.remote_provider import ServiceProvider
from rollout_worker.sandboxes.remote_sandbox import RemoteSandbox
from rollout_worker.sandboxes.settings import ImageSettings, settings_of

USD_PER_CORE_HOUR = 0.00003942 * 3600
USD_PER_GIB_HOUR = 0.00000672 * 3600
"""Prices of sandboxes on https://modal.com/pricing in November 2026. A sandbox is billed for what it declares, because
it can use no more; regions and contracts change the price."""

_WAIT = "trap '' TERM; while :; do sleep 3600 & wait; done"
_CALL_S = 90
_PIECE = 1 << 20  # the client's buffer holds 2 MiB
_END_S = 60.0
_ENDED = (124, 128 + 9)
"""Exit codes of a sandbox that reached its maximum lifetime or was terminated."""
_TAG_STATE, _TAG_OWNER = "rollout-state", "rollout-owner"


class ModalSettings(ImageSettings):
    app_name: str = Field(default="rollout", min_length=1, description="App of Modal; it is made if there is none.")
    default_image: str | None = Field(default=None, description="Of tasks that name none, and of what is tried out.")
    registry_secret: str | None = Field(default=None, description="Name of a Modal secret for a private registry.")
    environment: str | None = Field(default=None, description="Environment of Modal; default: the profile's.")
    region: str | None = Field(default=None, description="Where sandboxes run; default: anywhere.")
    max_lifetime_secs: int = Field(default=6 * 3600, ge=60, le=86400, description="A sandbox ends itself after that.")
    max_sandboxes: int = Field(default=100, ge=1, description="At one time, of one worker.")
    usd_per_core_hour: float = Field(default=USD_PER_CORE_HOUR, ge=0, description="The price of a core.")
    usd_per_gib_hour: float = Field(default=USD_PER_GIB_HOUR, ge=0, description="The price of a GiB of memory.")


class ModalReach(Reach):
    wait_s = 20.0

    def __init__(self, modal: Any, sandbox: Any) -> None:
        self._modal = modal
        self._sandbox = sandbox

    async def call(self, script: str, data: bytes) -> bytes:
        text = script.encode(errors="surrogateescape")  # as input: arguments may take 64 KiB
        words = ("/bin/sh", "-c", f's=$(head -c {len(text)}); printf R; eval "$s"')
        out = bytearray()
        try:
            async with asyncio.timeout(_CALL_S):
                process = await self._sandbox.exec.aio(*words, text=False, timeout=_CALL_S)
                await _send(process.stdin, text)
                waits = bool(data)
                async for piece in process.stdout:
                    out += piece
                    if waits and out:
                        waits = False
                        await _send(process.stdin, data)
        except (self._modal.exception.Error, TimeoutError, OSError) as error:
            await self._check(error)
            raise DroppedError(f"{type(error).__name__}: {error}") from error
        if not out:
            await self._check(None)
            raise DroppedError("it printed nothing", inside=True)
        return bytes(out[1:])

    async def _check(self, error: Exception | None) -> None:
        """Raise SandboxGoneError if the sandbox itself ended, not only the connection."""
        known = self._modal.exception
        if isinstance(error, known.SandboxTerminatedError | known.SandboxTimeoutError | known.NotFoundError):
            raise SandboxGoneError(f"the sandbox is gone: {type(error).__name__}: {error}") from error
        try:
            code = await self._sandbox.poll.aio()
        except (known.Error, OSError):
            return
        if code is not None:
            kind = SandboxGoneError if code in _ENDED else SandboxEndedError
            raise kind(f"the sandbox ended by itself, or by its lifetime, with {code}") from error

    async def fetch(self, path: str, target: Path) -> bool:
        try:
            await self._sandbox.filesystem.copy_to_local.aio(path, str(target))
        except (self._modal.exception.Error, OSError):  # calls work where this does not
            return False
        return True


async def _send(stdin: Any, data: bytes) -> None:
    for start in range(0, len(data), _PIECE):
        stdin.write(data[start : start + _PIECE])
        await stdin.drain.aio()


class ModalProvider(ServiceProvider):
    name = "modal"
    allowlists = "names of an allowlist are let through by the server name of TLS, on port 443 only"

    def __init__(self, state: Path, settings: ModalSettings, modal: Any) -> None:
        super().__init__(
            state,
            max_sandboxes=settings.max_sandboxes,
            price=Price(settings.usd_per_core_hour, settings.usd_per_gib_hour),
            default_image=settings.default_image,
            probed=Limits(0.125, 128, 512, 64),
            opens=f"{CONNECT}\nconnects 1.1.1.1 443",
        )
        self._settings = settings
        self._modal = modal
        self._app: Any = None

    async def _connect(self) -> None:
        await super()._connect()
        try:
            self._app = await self._modal.App.lookup.aio(
                self._settings.app_name, create_if_missing=True, environment_name=self._settings.environment
            )
        except (self._modal.exception.Error, OSError) as error:
            why = f"Modal cannot be used: {error} (a token is made with `modal token new`)"
            raise SandboxRefusedError(why, reasons=[why]) from error

    async def reap(self) -> None:
        """Reap also sandboxes whose claims were lost with the disk of a host that came back."""
        await super().reap()
        try:
            found = self._modal.Sandbox.list.aio(app_id=self._app.app_id, tags={_TAG_STATE: self._state_id})
            async for sandbox in found:
                if await self._is_dead((await sandbox.get_tags.aio()).get(_TAG_OWNER, "")):
                    await sandbox.terminate.aio()
        except self._modal.exception.Error as error:
            raise SandboxCreateError(f"sandboxes of Modal cannot be listed: {error}") from error

    # Probing

    def _remarks(self) -> list[str]:
        return ["storage and the number of processes are the service's"]

    # Making and removing

    async def _start(self, claim: Claim, spec: Spec, found: Capabilities, *, wait: bool) -> RemoteSandbox:
        known = self._modal.exception
        image = self._image(spec)
        limits = spec.limits
        try:
            secret = self._settings.registry_secret
            kept = None if secret is None else self._modal.Secret.from_name(secret)
            made = await self._modal.Sandbox.create.aio(
                "/bin/sh",
                "-c",
                _WAIT,
                app=self._app,
                name=claim.name,
                tags={_TAG_STATE: self._state_id, _TAG_OWNER: self._owner},
                image=self._modal.Image.from_registry(image, secret=kept).entrypoint([]),
                timeout=self._settings.max_lifetime_secs,
                cpu=(limits.cpus, limits.cpus),
                memory=(limits.memory_mb, limits.memory_mb),
                region=self._settings.region,
                **_network(spec.network),
            )
        except (known.RemoteError, known.ImageBuildError) as error:
            raise ImagePullError(f"the image {image} cannot be had: {error}") from error
        except known.ResourceExhaustedError as error:
            raise SandboxNoRoomError(f"Modal has no room: {error}") from error
        except (known.AuthError, known.InvalidError, known.PermissionDeniedError) as error:
            raise SandboxRefusedError(f"Modal refuses {claim.name}: {error}", reasons=[str(error)]) from error
        except (known.Error, OSError) as error:
            raise SandboxCreateError(f"{claim.name} could not be made: {error}") from error
        return await self._enter(claim, spec, found, ModalReach(self._modal, made), kill="new")

    async def _remove(self, claim: Claim) -> None:
        known = self._modal.exception
        try:
            async with asyncio.timeout(_END_S):
                with contextlib.suppress(known.NotFoundError):
                    sandbox = await self._modal.Sandbox.from_name.aio(
                        self._settings.app_name, claim.name, environment_name=self._settings.environment
                    )
                    await sandbox.terminate.aio(wait=True)
        except (known.SandboxTerminatedError, known.SandboxTimeoutError):
            return
        except (known.Error, TimeoutError, OSError) as error:
            raise SandboxTeardownError(f"{claim.name} is not removed: {type(error).__name__}: {error}") from error


def _network(network: Network) -> dict[str, Any]:
    if network.mode == "none":
        return {"block_network": True}
    if network.mode == "public":
        return {}
    names = names_among(network.hosts)
    blocks = [str(ipaddress.ip_network(host, strict=False)) for host in network.hosts if host not in names]
    return {"outbound_cidr_allowlist": blocks, "outbound_domain_allowlist": names}


def open_modal(state: Path, config: Mapping[str, Any] = MappingProxyType({})) -> ModalProvider:
    """Open the provider `modal`; use it with `async with`. Raises ConfigError if a setting is wrong or the extra is
    missing."""
    settings = settings_of(ModalSettings, config, ModalProvider.name)
    try:
        modal = importlib.import_module("modal")
    except ImportError as error:
        raise ConfigError("the provider modal needs more: pip install 'rollout-engine[modal]'") from error
    return ModalProvider(state, settings, modal)
