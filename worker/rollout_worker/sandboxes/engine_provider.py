"""Base of the providers of container engines: claims, labels, probing, creating and removing containers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from rollout_worker.sandboxes.allowlist import Allowlist
from rollout_worker.sandboxes.claims import Capacity, Claim, is_unlocked
from rollout_worker.sandboxes.engine_api import Engine, EngineError, EngineUnreachableError
from rollout_worker.sandboxes.engine_guarding import EngineGuard
from rollout_worker.sandboxes.engine_images import EngineImages
from rollout_worker.sandboxes.engine_network import WayOut, can_lead_out, listen_in
from rollout_worker.sandboxes.engine_sandbox import Container, EngineSandbox
from rollout_worker.sandboxes.errors import (
    ImageError,
    SandboxCreateError,
    SandboxError,
    SandboxRefusedError,
    SandboxTeardownError,
)
from rollout_worker.sandboxes.owning import PROXY_PORT, OwningProvider, identity, proxy_environment
from rollout_worker.sandboxes.port import (
    CONTAINER,
    MIB,
    BuiltImage,
    Capabilities,
    Enforcement,
    Host,
    Image,
    LimitName,
    Limits,
    MakesImages,
    NetworkMode,
    Price,
    RootFs,
    Spec,
)
from rollout_worker.sandboxes.proxy import Proxy
from rollout_worker.sandboxes.settings import ImageSettings
from rollout_worker.sandboxes.threads import in_thread
from rollout_worker.sandboxes.uplink import host_resolv_conf, own_resolv_conf

_SANDBOX, _OWNER, _STATE = "rollout.sandbox", "rollout.owner", "rollout.state"
_HOST, _LOCK = "rollout.host", "rollout.lock"  # path of the owner's lock, for whoever sees the same files
# Waits for ever, reaps orphans, and ends at SIGTERM.
_FIRST = ["/bin/sh", "-c", "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done"]
_MORE_PIDS = 4  # the first process and its sleep, and those of the engine
# Capabilities that engines leave to root, dropped as in sandboxes of this host.
_DROPPED = ["MKNOD", "NET_RAW"]
_BEGIN = """
for d; do mkdir -p -- "$d" || exit 1; case $d in /tmp|/var/tmp) chmod 1777 "$d";; esac; done
"""
_HOME = 'h=${HOME:-/}; [ -d "$h" ] && [ -w "$h" ] || h=/tmp; printf %s "$h"'
_NAMES = "resolv.conf"
_TEARDOWN_TRIES = 3


class EngineSettings(ImageSettings):
    host: str | None = Field(
        default=None, pattern=r"^(unix|tcp|http|https|ssh|npipe)://", description="Where the engine listens."
    )
    default_image: str | None = Field(default=None, description="Of sandboxes whose task names no image.")
    network: str = Field(
        default="bridge",
        description="The engine's network behind the network `public`. If it is not set, and the worker is root of the "
        "engine's host, each container has a way out of its own.",
    )


class EngineProvider(OwningProvider[EngineSandbox], MakesImages):
    """Containers carry labels: the next provider on the same state directory removes what a dead owner left, even if
    its claims were lost."""

    def __init__(
        self, state: Path, settings: EngineSettings, urls: Sequence[str], *, price: Price | None = None
    ) -> None:
        """`urls` are the addresses where the engine may listen, the most likely first."""
        super().__init__(state.absolute() / self.name, Capacity(0, 0), price)
        self._settings = settings
        self._urls = [settings.host] if settings.host else list(urls)
        self._guard: EngineGuard | None = None
        self._state_id = ""
        self._engine = self._engine_at(self._urls[0])
        self._images = EngineImages(self._engine)
        self._tried = False
        self._proxies: dict[str, Proxy] = {}
        self._ways_out: dict[str, WayOut] = {}
        self._leads_out = False

    @property
    def leads_out(self) -> bool:
        """Whether containers with network `public` have their own way out; known after a probe."""
        return self._leads_out

    @property
    def engine(self) -> Engine:
        return self._engine

    async def _connect(self) -> None:
        """Connect. Raises SandboxRefusedError if there is no engine or no aiodocker."""
        self._state_id = await in_thread(identity, self.state)
        await self._open_engine()
        self._guard = await EngineGuard.start(self._engine.url, f"{_OWNER}={self._owner}")

    async def _open_engine(self) -> None:
        faults: list[str] = []
        for url in self._urls:
            if (path := _missing_socket(url)) is not None:
                faults.append(f"there is no socket {path}")
                continue
            self._engine = self._engine_at(url)
            self._images = EngineImages(self._engine)
            try:
                await self._engine.open()
                return
            except SandboxCreateError as error:
                faults.append(error.message)
        why = f"no {self.name} engine answers: {'; '.join(faults)}: start it, or set host under provider_config"
        raise SandboxRefusedError(why, reasons=faults)

    async def _disconnect(self, *, cleared: bool) -> None:
        await self._engine.close()
        if self._guard is not None:
            await self._guard.stop(cleared=cleared)
            self._guard = None

    async def reap(self) -> None:
        """Also remove containers labelled with this state directory, or with one that no longer exists."""
        await super().reap()
        names = {claim.name for claim in await in_thread(self._journal.all)}
        with contextlib.suppress(EngineError, EngineUnreachableError):
            for name, labels in await self._engine.labelled(f"{_STATE}={self._state_id}"):
                # A claim is written before its container, and removed after it.
                if name not in names and labels.get(_OWNER) != self._owner:
                    await self._engine.remove(name)
            # Also those of state directories that no longer exist, as of a deleted job.
            for name, labels in await self._engine.labelled(f"{_HOST}={host_id()}"):
                lock = labels.get(_LOCK)
                if lock and labels.get(_STATE) != self._state_id and await in_thread(is_unlocked, Path(lock)):
                    await self._engine.remove(name)

    # Capabilities

    @property
    def _may_find_more(self) -> bool:
        return not self._tried and self._images.last is not None  # there is now an image to probe with

    async def _find(self) -> Capabilities:
        try:
            info = await self._engine.info()
            public = await self._engine.has_network(self._settings.network) or self._settings.network == "host"
        except (EngineError, EngineUnreachableError) as error:
            raise SandboxRefusedError(f"{self.name} does not answer: {error}", reasons=[str(error)]) from error
        if info.get("OSType", "linux") != "linux":
            why = f"{self.name} runs {info['OSType']} containers; sandboxes need linux"
            raise SandboxRefusedError(why, reasons=[why])
        limits: dict[LimitName, Enforcement] = {
            "cpus": "kernel" if info.get("CpuCfsQuota", info.get("CPUCfsQuota")) else "no",
            "memory": "kernel" if info.get("MemoryLimit") else "no",
            "pids": "kernel" if info.get("PidsLimit", True) else "no",
            "storage": "watched",
        }
        notes = ["the kernel is shared, and system calls are filtered as the engine does"]
        if not public:
            notes.append(f"the engine has no network {self._settings.network}: set network under provider_config")
        self._capacity = Capacity(float(info.get("NCPU") or 1), int(info.get("MemTotal") or 0) * 9 // 10 >> 20)
        reached, left_behind = await self._try_out(notes, limits)
        networks: set[NetworkMode] = {"none"}
        if public or self._leads_out:
            networks.add("public")
        if public and not self._leads_out:
            notes.append(f"the network `public` is the engine's {self._settings.network}: this host is reached by it")
        if reached:
            networks.add("allowlist")
        roots: set[Literal["host", "rootfs", "image"]] = {"image"}
        if self._settings.default_image:
            roots.add("host")
        return replace(
            CONTAINER,
            users=True,
            roots=frozenset(roots),
            networks=frozenset(networks),
            limits=limits,
            left_behind=left_behind,
            notes=tuple(notes),
        )

    async def _try_out(self, notes: list[str], limits: dict[LimitName, Enforcement]) -> tuple[bool, bool]:
        """Probe with a container, if there is an image for it. Return whether containers' networks can be reached from
        here, and whether processes that a command left behind can go on printing."""
        image = await self._any_image()
        self._tried = image is not None
        if image is None:
            notes.append("allowlists cannot be tried out before there is an image: set default_image")
            return False, False
        spec = Spec(root=Image(image), limits=Limits(min(0.5, self._capacity.cpus), 128, 256, 64))
        try:
            sandbox = await self._make(spec, replace(CONTAINER, users=True, limits=limits), wait=None)
        except SandboxError as error:
            raise SandboxRefusedError(
                f"{self.name} sandboxes do not work here: {error.message}", reasons=[error.message]
            ) from error
        async with sandbox:
            left_behind = await _lets_print(sandbox)
            if not left_behind:
                notes.append("what a command leaves running is ended when it prints: let it print to a file")
            pid = int((await self._engine.show(sandbox.name))["State"]["Pid"])
            try:
                (await in_thread(listen_in, pid, PROXY_PORT)).close()
            except OSError as error:
                notes.append(f"allowlists cannot be enforced: containers' networks are out of reach: {error.strerror}")
                return False, left_behind
            if "network" not in self._settings.model_fields_set:
                try:
                    await in_thread(can_lead_out, pid, self.state)
                    self._leads_out = True
                except OSError as error:
                    notes.append(f"containers have no way out of their own: /dev/net/tun: {error.strerror}")
        return True, left_behind

    async def _any_image(self) -> str | None:
        if self._settings.default_image:
            await self._images.pull(self._settings.default_image, 600.0, anew=False)
            return self._settings.default_image
        return self._images.last

    def _refusals(self, spec: Spec) -> list[str]:
        if isinstance(spec.root, RootFs):
            return [f"`{self.name}` sandboxes start from images, not from directories"]
        if isinstance(spec.root, Host) and self._settings.default_image is None:
            return ["there is no image: set docker_image of the task, or default_image under provider_config"]
        return []

    # Images

    async def build_image(self, context: Path, *, timeout_s: float, anew: bool) -> BuiltImage:
        return await self._images.build(context, timeout_s, anew=anew)

    async def pull_image(self, reference: str, *, timeout_s: float, anew: bool) -> BuiltImage:
        return await self._images.pull(reference, timeout_s, anew=anew)

    # Making and removing

    async def _start(self, claim: Claim, spec: Spec, found: Capabilities, *, wait: bool) -> EngineSandbox:
        try:
            return await self._run(claim, spec, found)
        except (EngineError, EngineUnreachableError, ImageError) as error:
            raise SandboxCreateError(f"{claim.name} could not be made: {error}") from error

    async def _run(self, claim: Claim, spec: Spec, found: Capabilities) -> EngineSandbox:
        await in_thread(_write_names, Path(claim.box))
        image = spec.root.reference if isinstance(spec.root, Image) else self._settings.default_image or ""
        built = await self._images.pull(image, 600.0, anew=False)
        config = self._config(claim, spec, image)
        is_probe = not found.networks
        if built.has_entrypoint and not is_probe:  # it gets the first process as its command, as with `docker run`
            del config["Entrypoint"]
            config |= {"Cmd": _FIRST, "User": built.user or "0", "WorkingDir": built.workdir or "/"}
        await self._engine.create(claim.name, config)
        await self._engine.start(claim.name)
        user = str(spec.user) if spec.user is not None else built.user or "0"
        is_root = user in ("0", "root")
        begin = _BEGIN + (_HOME if is_root else "")
        try:
            code, said = await self._engine.run(claim.name, begin, *spec.directories)
        except EngineError:
            await self._check_entrypoint(claim, built)
            raise
        if code != 0:
            await self._check_entrypoint(claim, built)
            raise SandboxCreateError(
                f"{claim.name} has no {', '.join(spec.directories)}: {said.decode(errors='replace')}"
            )
        try:
            home = said if is_root else (await self._engine.run(claim.name, _HOME, user=user))[1]
        except EngineError as error:
            why = f"commands cannot run as user {user} in {image}: {error.message}"
            raise SandboxRefusedError(why, reasons=[why]) from error
        known = self._known(claim, spec, found, home.decode(errors="surrogateescape") or "/")
        container = Container(self._engine, built.user or "0", built.has_entrypoint, self._open_way_out)
        sandbox = EngineSandbox(known, container)
        await self._open_way_out(sandbox)
        sandbox.watch()
        return sandbox

    async def _check_entrypoint(self, claim: Claim, built: BuiltImage) -> None:
        """Raise SandboxCreateError if the entrypoint has ended, and the container with it."""
        state = (await self._engine.show(claim.name))["State"]
        if built.has_entrypoint and not state["Running"]:
            raise SandboxCreateError(
                f"{claim.name} does not start: the ENTRYPOINT of its image ended with exit code {state['ExitCode']}: "
                'it must go on with its arguments (exec "$@")'
            )

    def _config(self, claim: Claim, spec: Spec, image: str) -> dict[str, Any]:
        limits = spec.limits
        is_public = spec.network.mode == "public"
        env = {"LANG": "C.UTF-8"}
        if spec.network.mode == "allowlist":
            env |= proxy_environment()
        env.update(spec.env)
        mounts = [
            {"Type": "bind", "Source": str(m.source.absolute()), "Target": m.target, "ReadOnly": m.read_only}
            for m in spec.mounts
        ]
        if is_public and self._leads_out:
            names = {"Type": "bind", "Source": str(Path(claim.box) / _NAMES), "Target": "/etc/resolv.conf"}
            mounts.append({**names, "ReadOnly": True})
        return {
            "Image": image,
            "Entrypoint": _FIRST,
            "Cmd": [],
            "Env": [f"{name}={value}" for name, value in env.items()],
            "User": "0",
            "WorkingDir": "/",
            "Hostname": claim.name[-63:],
            "Labels": {
                _SANDBOX: claim.name,
                _OWNER: self._owner,
                _STATE: self._state_id,
                _HOST: host_id(),
                _LOCK: str(self._journal.lock_of(self._owner)),
            },
            "Healthcheck": {"Test": ["NONE"]},
            "HostConfig": {
                "NetworkMode": self._settings.network if is_public and not self._leads_out else "none",
                "NanoCpus": int(limits.cpus * 1e9),
                "Memory": limits.memory_mb * MIB,
                "MemorySwap": limits.memory_mb * MIB,
                "PidsLimit": limits.pids + _MORE_PIDS,
                "Ulimits": [
                    {"Name": "core", "Soft": 0, "Hard": 0},
                    {"Name": "fsize", "Soft": limits.storage_mb * MIB, "Hard": limits.storage_mb * MIB},
                    *self._ulimits(),
                ],
                "CapDrop": _DROPPED,
                "Mounts": mounts,
                "LogConfig": {"Type": "none"},
                "RestartPolicy": {"Name": "no"},
            },
        }

    def _engine_at(self, url: str) -> Engine:
        return Engine(url)

    def _ulimits(self) -> list[dict[str, Any]]:
        """Return further ulimits that an engine needs."""
        return []

    async def _open_way_out(self, sandbox: EngineSandbox) -> None:
        """Open the way out of a container's network, which is a new one at each start."""
        network = sandbox.spec.network
        if network.mode != "allowlist" and not (network.mode == "public" and self._leads_out):
            return
        await self._close_way_out(sandbox.name)
        pid = int((await self._engine.show(sandbox.name))["State"]["Pid"])
        try:
            if network.mode == "public":
                way_out = self._ways_out[sandbox.name] = await WayOut.start(
                    own_resolv_conf(host_resolv_conf())[1], network.hosts
                )
                await in_thread(way_out.lead_from, pid, self.state)
                return
            listener = await in_thread(listen_in, pid, PROXY_PORT)
        except OSError as error:
            raise SandboxCreateError(f"{sandbox.name}: its network is out of reach: {error.strerror}") from error
        proxy = self._proxies[sandbox.name] = Proxy(Allowlist(network.hosts))
        await proxy.start(listener)

    async def _close_way_out(self, name: str) -> None:
        if (proxy := self._proxies.pop(name, None)) is not None:
            await proxy.stop()
        if (way_out := self._ways_out.pop(name, None)) is not None:
            await way_out.stop()

    async def _remove(self, claim: Claim) -> None:
        await self._close_way_out(claim.name)
        for left in range(_TEARDOWN_TRIES - 1, -1, -1):
            try:
                await self._engine.remove(claim.name)
                return
            except EngineUnreachableError as error:
                raise SandboxTeardownError(f"{claim.name} is not removed: {error}") from error
            except EngineError as error:
                if left == 0:
                    raise SandboxTeardownError(f"{claim.name} is not removed: {error}") from error
                await asyncio.sleep(0.5)


async def _lets_print(sandbox: EngineSandbox) -> bool:
    script = "(while sleep 0.1; do echo x; echo x >> /tmp/left; done) & echo started"
    await sandbox.exec(script, cwd="/", user=0)
    await asyncio.sleep(0.6)
    before = (await sandbox.exec("cat /tmp/left", cwd="/", user=0)).stdout.size
    await asyncio.sleep(0.6)
    return (await sandbox.exec("cat /tmp/left", cwd="/", user=0)).stdout.size > before


def host_id() -> str:
    """Return an id shared by all who see the same files as this process, until this machine reboots."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    mounts = Path("/proc/self/ns/mnt")
    if not boot.exists():  # not Linux
        return socket.gethostname()
    return f"{boot.read_text(encoding='ascii').strip()}-{mounts.stat().st_ino}"


def _write_names(box: Path) -> None:
    """Write what a container will find in /etc/resolv.conf."""
    names = box / _NAMES
    names.write_text(own_resolv_conf(host_resolv_conf())[0])
    names.chmod(0o644)


def _missing_socket(url: str) -> str | None:
    path = url.removeprefix("unix://")
    return path if path != url and not Path(path).exists() else None
