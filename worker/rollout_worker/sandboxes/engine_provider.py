"""What the providers of container engines share: claims, labels, probing, making and removing containers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import structlog
from pydantic import Field

from rollout_worker.sandboxes.allowlist import Allowlist
from rollout_worker.sandboxes.claims import Capacity, Claim, Journal, is_unlocked
from rollout_worker.sandboxes.engine_api import Engine, EngineError, EngineUnreachableError
from rollout_worker.sandboxes.engine_guarding import EngineGuard
from rollout_worker.sandboxes.engine_images import EngineImages
from rollout_worker.sandboxes.engine_network import WayOut, can_lead_out, listen_in
from rollout_worker.sandboxes.engine_sandbox import EngineSandbox, Made
from rollout_worker.sandboxes.errors import (
    ImageError,
    SandboxCreateError,
    SandboxError,
    SandboxNoRoomError,
    SandboxRefusedError,
    SandboxTeardownError,
)
from rollout_worker.sandboxes.local_sandbox import Price, in_thread
from rollout_worker.sandboxes.port import (
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
    Provider,
    RootFs,
    Spec,
)
from rollout_worker.sandboxes.proxy import Proxy
from rollout_worker.sandboxes.settings import ImageSettings
from rollout_worker.sandboxes.uplink import host_resolv_conf, own_resolv_conf

log = structlog.get_logger()

PROXY_PORT = 3128
_SANDBOX, _OWNER, _STATE = "rollout.sandbox", "rollout.owner", "rollout.state"
_HOST, _LOCK = "rollout.host", "rollout.lock"  # where the owner's lock is, for whoever sees the same files
# Waits for ever, reaps orphans, and ends when it is asked to.
_FIRST = ["/bin/sh", "-c", "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done"]
_MORE_PIDS = 4  # that first process and its sleep, and what the engine runs itself
# Of those that engines leave to root; as sandboxes of this host.
_DROPPED = ["MKNOD", "NET_RAW"]
_BEGIN = """
for d; do mkdir -p -- "$d" || exit 1; case $d in /tmp|/var/tmp) chmod 1777 "$d";; esac; done
"""
_HOME = 'h=${HOME:-/}; [ -d "$h" ] && [ -w "$h" ] || h=/tmp; printf %s "$h"'
_NAMES = "resolv.conf"
_ROOM_S, _REAP_EVERY_S = 0.1, 5.0
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


@dataclass(frozen=True, slots=True)
class Found:
    """What the engine was found to do. `reached`: sockets can be opened in its containers' networks from here."""

    capabilities: Capabilities
    capacity: Capacity
    reached: bool


class EngineProvider(Provider, MakesImages):
    """Containers carry labels: whoever opens a provider on the same state directory next removes what a dead owner
    left, also if its claims were lost."""

    def __init__(
        self, state: Path, settings: EngineSettings, urls: Sequence[str], *, price: Price | None = None
    ) -> None:
        """`urls`: where the engine may listen, the most likely first."""
        self._journal = Journal(state.absolute() / self.name)
        self._settings = settings
        self._urls = [settings.host] if settings.host else list(urls)
        self._price = price or Price()
        self._owner = secrets.token_hex(6)
        self._lock = -1
        self._guard: EngineGuard | None = None
        self._made = 0
        self._state_id = ""
        self._engine = self._engine_at(self._urls[0])
        self._images = EngineImages(self._engine)
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self._probing = asyncio.Lock()
        self._found: Found | None = None
        self._tried = False
        self._sandboxes: set[EngineSandbox] = set()
        self._proxies: dict[str, Proxy] = {}
        self._ways_out: dict[str, WayOut] = {}
        self._leads_out = False

    @property
    def capacity(self) -> Capacity:
        """What its machine has, once it was probed."""
        assert self._found is not None
        return self._found.capacity

    @property
    def leads_out(self) -> bool:
        """Whether containers with network `public` have a way out of their own, once it was probed."""
        return self._leads_out

    @property
    def engine(self) -> Engine:
        return self._engine

    async def open(self) -> None:
        """SandboxRefusedError: there is no engine, or no aiodocker."""
        try:
            await in_thread(self._journal.prepare)
            self._state_id = await in_thread(_state_id, self._journal.state)
            self._lock = await in_thread(self._journal.hold_owner, self._owner)
        except OSError as error:
            raise SandboxCreateError(f"{self._journal.state} cannot hold claims: {error.strerror}") from error
        try:
            await self._connect()
            self._guard = await EngineGuard.start(self._engine.url, f"{_OWNER}={self._owner}")
            await self.reap()
        except BaseException:
            await self.close()
            raise

    async def _connect(self) -> None:
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

    async def close(self) -> None:
        results = await asyncio.gather(*(s.destroy() for s in list(self._sandboxes)), return_exceptions=True)
        await self._engine.close()
        if self._guard is not None:
            await self._guard.stop(cleared=not any(isinstance(fault, BaseException) for fault in results))
            self._guard = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
            if not await in_thread(self._journal.of, self._owner):
                await in_thread(self._journal.drop_owner, self._owner)
        for fault in results:
            if isinstance(fault, BaseException):
                raise fault

    async def reap(self) -> None:
        """Remove containers of dead owners: those that are claimed, and those that carry this state's label."""
        lost = await in_thread(self._journal.lost)
        names = {claim.name for claim in await in_thread(self._journal.all)}
        for claim in lost:
            try:
                await self._remove(claim)
            except SandboxTeardownError as error:
                log.warning("sandbox_not_reaped", sandbox=claim.name, error=error.message)
        with contextlib.suppress(EngineError, EngineUnreachableError):
            for name, labels in await self._engine.labelled(f"{_STATE}={self._state_id}"):
                # A claim is written before its container, and removed after it.
                if name not in names and labels.get(_OWNER) != self._owner:
                    await self._engine.remove(name)
            # Also of state directories that are not there any more, as that of a job that was deleted.
            for name, labels in await self._engine.labelled(f"{_HOST}={host_id()}"):
                lock = labels.get(_LOCK)
                if lock and labels.get(_STATE) != self._state_id and await in_thread(is_unlocked, Path(lock)):
                    await self._engine.remove(name)

    # What there is

    async def probe(self) -> Capabilities:
        return (await self._probe()).capabilities

    async def _probe(self) -> Found:
        async with self._probing:
            if self._found is not None and (self._tried or self._images.last is None):
                return self._found
            self._found = await self._find()  # again, once there is an image to try it out with
            return self._found

    async def _find(self) -> Found:
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
        capacity = Capacity(float(info.get("NCPU") or 1), int(info.get("MemTotal") or 0) * 9 // 10 >> 20)
        reached, left_behind = await self._try_out(notes, limits, capacity)
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
        capabilities = Capabilities(
            private_directories=True,
            own_processes=True,
            hides_sandboxes=True,
            hides_host=True,
            writable_root=True,
            users=True,
            roots=frozenset(roots),
            networks=frozenset(networks),
            limits=limits,
            left_behind=left_behind,
            notes=tuple(notes),
        )
        return Found(capabilities, capacity, reached)

    async def _try_out(
        self, notes: list[str], limits: dict[LimitName, Enforcement], capacity: Capacity
    ) -> tuple[bool, bool]:
        """By doing, where there is an image to do it with: whether containers' networks can be reached from here, and
        whether what a command leaves behind can go on to print."""
        image = await self._any_image()
        self._tried = image is not None
        if image is None:
            notes.append("allowlists cannot be tried out before there is an image: set default_image")
            return False, False
        spec = Spec(root=Image(image), limits=Limits(min(0.5, capacity.cpus), 128, 256, 64))
        capabilities = Capabilities(
            private_directories=True,
            own_processes=True,
            hides_sandboxes=True,
            hides_host=True,
            writable_root=True,
            users=True,
            roots=frozenset({"image"}),
            networks=frozenset({"none"}),
            limits=limits,
        )
        try:
            sandbox = await self._make(spec, capabilities, capacity, wait=None)
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
                    await in_thread(can_lead_out, pid, self._journal.state)
                    self._leads_out = True
                except OSError as error:
                    notes.append(f"containers have no way out of their own: /dev/net/tun: {error.strerror}")
        return True, left_behind

    async def _any_image(self) -> str | None:
        if self._settings.default_image:
            await self._images.pull(self._settings.default_image, 600.0, anew=False)
            return self._settings.default_image
        return self._images.last

    def _check(self, spec: Spec, found: Found) -> None:
        capabilities = found.capabilities
        reasons: list[str] = []
        if spec.network.mode not in capabilities.networks:
            reasons.append(f"network `{spec.network.mode}` cannot be enforced here")
        elif spec.network.mode == "allowlist":
            reasons += Allowlist.faults(spec.network.hosts)
        for path in (*spec.directories, *(m.target for m in spec.mounts), *([spec.workdir] if spec.workdir else [])):
            if not path.startswith("/") or path != os.path.normpath(path) or path == "/" or "\0" in path:
                reasons.append(f"{path!r} is not an absolute path below / without . and ..")
        reasons += [f"there is no {m.source} to mount" for m in spec.mounts if not m.source.exists()]
        for name in sorted(spec.require):
            if capabilities.limits[name] != "kernel":
                how = "by looking now and then" if capabilities.limits[name] == "watched" else "not at all"
                reasons.append(f"the limit on {name} is kept {how} here")
        limits = spec.limits
        if limits.cpus > found.capacity.cpus:
            reasons.append(f"{limits.cpus:g} cpus are more than the engine's {found.capacity.cpus:g}")
        if limits.memory_mb > found.capacity.memory_mb:
            reasons.append(f"{limits.memory_mb} MB are more than the engine's {found.capacity.memory_mb} MB")
        if min(limits.cpus, limits.memory_mb, limits.storage_mb, limits.pids) <= 0:
            reasons.append("limits must be above 0")
        if isinstance(spec.root, RootFs):
            reasons.append(f"`{self.name}` sandboxes start from images, not from directories")
        elif isinstance(spec.root, Host) and self._settings.default_image is None:
            reasons.append("there is no image: set docker_image of the task, or default_image under provider_config")
        if reasons:
            raise SandboxRefusedError(
                f"{self.name} cannot keep what was asked for: {'; '.join(reasons)}", reasons=reasons
            )

    # Images

    async def build_image(self, context: Path, *, timeout_s: float, anew: bool) -> BuiltImage:
        return await self._images.build(context, timeout_s, anew=anew)

    async def pull_image(self, reference: str, *, timeout_s: float, anew: bool) -> BuiltImage:
        return await self._images.pull(reference, timeout_s, anew=anew)

    # Making and removing

    async def create(self, spec: Spec, *, wait: bool = True) -> EngineSandbox:
        found = await self._probe()
        self._check(spec, found)
        return await self._make(spec, found.capabilities, found.capacity, wait=wait)

    async def _make(
        self, spec: Spec, capabilities: Capabilities, capacity: Capacity, *, wait: bool | None
    ) -> EngineSandbox:
        """`wait` None: a probe, which must not wait for room."""
        self._made += 1
        name = f"{self.name}-{self._owner}-{self._made}"
        limits = spec.limits
        claim = Claim(name, self.name, self._owner, str(self._journal.boxes / name), limits.cpus, limits.memory_mb)
        try:
            if wait is None:
                await in_thread(self._journal.write, claim)
            else:
                await self._reserve(claim, capacity, wait)
            await in_thread(_make_box, Path(claim.box))
            sandbox = await self._start(claim, spec, capabilities, is_probe=wait is None)
        except BaseException as error:
            with contextlib.suppress(SandboxTeardownError):  # why it was not made is what matters; its claim stays
                await asyncio.shield(self._remove(claim))
            if isinstance(error, EngineError | EngineUnreachableError | OSError):
                raise SandboxCreateError(f"{name} could not be made: {error}") from error
            if isinstance(error, ImageError):
                raise SandboxCreateError(f"{name} could not be made: {error.message}") from error
            raise
        self._sandboxes.add(sandbox)
        sandbox.watch()
        return sandbox

    async def _reserve(self, claim: Claim, capacity: Capacity, wait: bool) -> None:
        if not wait:
            if self._turn.locked() or not await in_thread(self._journal.reserve, claim, capacity):
                raise SandboxNoRoomError
            return
        looked = time.monotonic()
        async with self._turn:
            while True:
                self._freed.clear()
                if await in_thread(self._journal.reserve, claim, capacity):
                    return
                if time.monotonic() - looked > _REAP_EVERY_S:
                    await self.reap()
                    looked = time.monotonic()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._freed.wait(), _ROOM_S)

    async def _start(self, claim: Claim, spec: Spec, capabilities: Capabilities, *, is_probe: bool) -> EngineSandbox:
        image = spec.root.reference if isinstance(spec.root, Image) else self._settings.default_image or ""
        built = await self._images.pull(image, 600.0, anew=False)
        config = self._config(claim, spec, image)
        if built.has_entrypoint and not is_probe:  # it gets the first process as its command, as with `docker run`
            del config["Entrypoint"]
            config |= {"Cmd": _FIRST, "User": built.user or "0", "WorkingDir": built.workdir or "/"}
        await self._engine.create(claim.name, config)
        await self._engine.start(claim.name)
        user = str(spec.user) if spec.user is not None else built.user or "0"

        async def remove(sandbox: EngineSandbox) -> None:
            await self._remove(claim)
            self._sandboxes.discard(sandbox)

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
        made = Made(
            home=home.decode(errors="surrogateescape") or "/",
            user=built.user or "0",
            out=Path(claim.box),
            price=self._price,
            restarts=built.has_entrypoint,
            begin=self._open_way_out,
            remove=remove,
        )
        sandbox = EngineSandbox(claim.name, spec, capabilities, self._engine, made)
        await self._open_way_out(sandbox)
        return sandbox

    async def _check_entrypoint(self, claim: Claim, built: BuiltImage) -> None:
        """SandboxCreateError: it ended, and the container with it."""
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
            url = f"http://127.0.0.1:{PROXY_PORT}"
            for name in ("http_proxy", "https_proxy"):  # a convenience: what does not use it reaches nobody
                env[name] = env[name.upper()] = url
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
        """More of them, as an engine may need."""
        return []

    async def _open_way_out(self, sandbox: EngineSandbox) -> None:
        """Of a container's network: that is a new one each time it is started."""
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
                await in_thread(way_out.lead_from, pid, self._journal.state)
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
        """SandboxTeardownError: something is left, and the claim stays."""
        await self._close_way_out(claim.name)
        try:
            for left in range(_TEARDOWN_TRIES - 1, -1, -1):
                try:
                    await self._engine.remove(claim.name)
                    break
                except EngineError:
                    if left == 0:
                        raise
                    await asyncio.sleep(0.5)
            await in_thread(self._journal.clear, claim)
        except (EngineError, EngineUnreachableError, OSError) as error:
            raise SandboxTeardownError(f"{claim.name} is not removed: {error}") from error
        finally:
            self._freed.set()


async def _lets_print(sandbox: EngineSandbox) -> bool:
    script = "(while sleep 0.1; do echo x; echo x >> /tmp/left; done) & echo started"
    await sandbox.exec(script, cwd="/", user=0)
    await asyncio.sleep(0.6)
    before = (await sandbox.exec("cat /tmp/left", cwd="/", user=0)).stdout.size
    await asyncio.sleep(0.6)
    return (await sandbox.exec("cat /tmp/left", cwd="/", user=0)).stdout.size > before


def host_id() -> str:
    """Of those who see the same files as this process, until this machine is started again."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    mounts = Path("/proc/self/ns/mnt")
    if not boot.exists():  # not Linux
        return socket.gethostname()
    return f"{boot.read_text(encoding='ascii').strip()}-{mounts.stat().st_ino}"


def _make_box(box: Path) -> None:
    """The sandbox's directory on this host, with what its container is to find in /etc/resolv.conf."""
    box.mkdir(0o700)
    names = box / _NAMES
    names.write_text(own_resolv_conf(host_resolv_conf())[0])
    names.chmod(0o644)


def _missing_socket(url: str) -> str | None:
    path = url.removeprefix("unix://")
    return path if path != url and not Path(path).exists() else None


def _state_id(state: Path) -> str:
    """Of this state directory, for labels: other hosts may use the same engine."""
    path = state / "id"
    with contextlib.suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
        file.write(secrets.token_hex(8))
    return path.read_text(encoding="utf-8")
