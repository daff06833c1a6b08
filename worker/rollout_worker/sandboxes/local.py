"""What the providers of this host share: claims, limits, the zygote, commands and files. Linux."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import structlog
from rollout.compute import cgroup as own_cgroup

from rollout_worker.sandboxes import cgroups, uplink
from rollout_worker.sandboxes.allowlist import Allowlist
from rollout_worker.sandboxes.claims import MARK, Capacity, Claim, Journal
from rollout_worker.sandboxes.errors import (
    SandboxCreateError,
    SandboxError,
    SandboxNoRoomError,
    SandboxRefusedError,
    SandboxTeardownError,
)
from rollout_worker.sandboxes.keeping import Zygote
from rollout_worker.sandboxes.local_sandbox import END_S, LocalSandbox, Price, Setting, in_thread
from rollout_worker.sandboxes.port import (
    MIB,
    Capabilities,
    Enforcement,
    LimitName,
    Limits,
    Network,
    NetworkMode,
    Provider,
    Spec,
)
from rollout_worker.sandboxes.proxy import Proxy

log = structlog.get_logger()

PROXY_PORT = 3128
NO_UPLINK = (
    "it needs /dev/net/tun (`modprobe tun`; of a container `--device /dev/net/tun`) and the right to make network "
    "namespaces; network_mode: host in a job's environment shares this host's network instead, its loopback included"
)
_ROOM_S = 0.1  # until claims are counted again: owners in other processes do not tell when they free something
_REAP_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Features:
    """What was found to work here, and why the rest does not."""

    namespaces: bool
    network: bool  # one of its own
    overlay: bool
    uplink: bool = False  # and a way out of it
    notes: tuple[str, ...] = ()


def host_capacity() -> Capacity:
    """This host's processors, and nine tenths of its memory, within the limits of this process's own control group."""
    quota = own_cgroup.cpu_limit()
    limit = own_cgroup.memory_limit()
    memory = int(psutil.virtual_memory().total)
    count = float(os.cpu_count() or 1)
    return Capacity(
        count if quota is None else min(quota, count),
        int((memory if limit is None else min(limit, memory)) * 0.9) >> 20,
    )


class LocalProvider(Provider):
    """Providers say what a sandbox's sandbox_init is to make; the rest is here."""

    def __init__(self, state: Path, *, capacity: Capacity | None = None, price: Price | None = None) -> None:
        """`state`: a directory of this host for claims and sandboxes; providers and processes may share one.

        `capacity`: what sandboxes with claims there may declare together; others wait. Default: this host's.
        """
        self._journal = Journal(state.absolute())
        self._capacity = capacity or host_capacity()
        self._price = price or Price()
        self._owner = secrets.token_hex(6)
        self._made = 0
        self._zygote = Zygote(self._journal.state, self._owner)
        self._groups = cgroups.Place({}, False)
        self._starting = asyncio.Lock()
        self._probing = asyncio.Lock()
        self._found: tuple[Features, Capabilities] | None = None
        self._turn = asyncio.Lock()  # in order: a sandbox that needs much is not overtaken for ever by small ones
        self._freed = asyncio.Event()
        self._sandboxes: set[LocalSandbox] = set()

    @property
    def state(self) -> Path:
        return self._journal.state

    @property
    def mount_point(self) -> Path:
        """An empty directory; sandboxes mount their roots there, each in a namespace of its own."""
        return self._journal.mount_point

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    @property
    def keeper_pid(self) -> int:
        return self._zygote.pid

    async def open(self) -> None:
        """Reap what dead owners left. SandboxRefusedError, SandboxCreateError."""
        if sys.platform != "linux":
            why = f"{self.name} sandboxes need Linux; this is {sys.platform}"
            raise SandboxRefusedError(why, reasons=[why])
        try:
            await in_thread(self._journal.prepare)
        except OSError as error:
            raise SandboxCreateError(f"{self.state} cannot hold sandboxes: {error.strerror}") from error
        await self.reap()
        self._groups = await in_thread(cgroups.find)
        await self._zygote.start()

    async def close(self) -> None:
        results = await asyncio.gather(*(s.destroy() for s in list(self._sandboxes)), return_exceptions=True)
        await self._zygote.stop()
        for fault in results:
            if isinstance(fault, BaseException):
                raise fault

    async def reap(self) -> None:
        """Clear what owners that are dead have left, on this state directory."""
        for claim, why in await in_thread(self._journal.reap):
            log.warning("sandbox_not_reaped", sandbox=claim.name, error=why)

    # What there is

    async def probe(self) -> Capabilities:
        return (await self._probe())[1]

    async def _probe(self) -> tuple[Features, Capabilities]:
        async with self._probing:
            if self._found is None:
                features = await self._find_features()
                self._found = features, self._describe(features)
            return self._found

    async def _find_features(self) -> Features:
        """The first of the provider's ways that makes a sandbox in which a command runs."""
        notes = self._missing()
        ways: Sequence[Features] = () if notes else self._ways()
        for features in ways:
            mode = "public" if features.uplink else "none" if features.network else "host"
            spec = Spec(network=Network(mode), limits=Limits(0.1, 256, 256, 64))
            claim = self._claim(spec, features)
            try:
                sandbox = await self._make(claim, spec, features, self._describe(features), wait=None)
                try:
                    finished = await sandbox.exec(["/bin/sh", "-c", "exit 7"], timeout_s=10)
                finally:
                    await sandbox.destroy()
            except SandboxError as error:
                notes += [] if error.message in notes else [error.message]
                continue
            if finished.exit_code == 7:
                return replace(features, notes=(*features.notes, *notes))
            notes.append(f"a command that was to end with 7 {finished.how}: {finished.stderr.text().strip()}")
        raise SandboxRefusedError(f"{self.name} sandboxes do not work here: {'; '.join(notes)}", reasons=notes)

    def _missing(self) -> list[str]:
        """What this provider needs and this host lacks; a sentence each."""
        return []

    @abstractmethod
    def _ways(self) -> Sequence[Features]:
        """Best first."""

    @abstractmethod
    def _describe(self, features: Features) -> Capabilities: ...

    @abstractmethod
    def _refusals(self, spec: Spec, features: Features) -> list[str]:
        """What this provider cannot keep, beyond its capabilities; a sentence each."""

    @abstractmethod
    def _prepare(self, box: Path, spec: Spec, features: Features) -> dict[str, Any]:
        """Make the files of a sandbox below `box`; what its sandbox_init needs to know. Blocks. OSError."""

    @abstractmethod
    def _home(self, box: Path, features: Features) -> str: ...

    @abstractmethod
    def _path(self) -> str:
        """PATH of commands."""

    @staticmethod
    def network_notes(features: Features) -> list[str]:
        return [] if features.uplink else [f"there is no network `public`: {NO_UPLINK}"]

    @staticmethod
    def networks(features: Features) -> frozenset[NetworkMode]:
        found: set[NetworkMode] = {"host"}
        if features.network:
            found |= {"none", "allowlist"}
        if features.uplink:
            found.add("public")
        return frozenset(found)

    @staticmethod
    def write_resolv_conf(path: Path, spec: Spec) -> None:
        """With the nameservers that the sandbox reaches."""
        text = uplink.host_resolv_conf()
        path.write_text(uplink.own_resolv_conf(text)[0] if spec.network.mode == "public" else text)

    def enforcement(self, features: Features) -> dict[LimitName, Enforcement]:
        by_group = self._groups.directories
        # RLIMIT_NPROC counts a user's processes in its user namespace, and does not hold root (getrlimit(2)).
        nproc = features.namespaces and os.geteuid() != 0
        return {
            "cpus": "kernel" if "cpu" in by_group else "no",
            "memory": "kernel" if "memory" in by_group else "process",
            "pids": "kernel" if "pids" in by_group or nproc else "no",
            "storage": "watched",
        }

    def _check(self, spec: Spec, features: Features, capabilities: Capabilities) -> None:
        reasons: list[str] = []
        if spec.network.mode not in capabilities.networks:
            reasons.append(f"network `{spec.network.mode}` cannot be enforced here")
        else:
            reasons += Allowlist.faults(spec.network.hosts)
        if spec.directories and not capabilities.private_directories:
            reasons.append(f"{', '.join(spec.directories)} cannot be private here: there is no mount namespace")
        if spec.mounts and not features.namespaces:
            reasons.append("mounts cannot be made here: there is no mount namespace")
        if spec.user is not None and not self._may_be(spec.user, capabilities):
            reasons.append(f"commands cannot run as user {spec.user} here")
        for path in (*spec.directories, *(m.target for m in spec.mounts), *([spec.workdir] if spec.workdir else [])):
            if not path.startswith("/") or path != os.path.normpath(path) or path == "/" or "\0" in path:
                reasons.append(f"{path!r} is not an absolute path below / without . and ..")
        reasons += [f"there is no {m.source} to mount" for m in spec.mounts if not m.source.exists()]
        for name in sorted(spec.require):
            if capabilities.limits[name] != "kernel":
                how = {"process": "for each process only", "watched": "by looking now and then", "no": "not at all"}
                reasons.append(f"the limit on {name} is kept {how[capabilities.limits[name]]} here")
        if spec.limits.cpus > self._capacity.cpus:
            reasons.append(f"{spec.limits.cpus:g} cpus are more than the {self._capacity.cpus:g} of this host")
        if spec.limits.memory_mb > self._capacity.memory_mb:
            reasons.append(f"{spec.limits.memory_mb} MB are more than this host's {self._capacity.memory_mb} MB")
        if min(spec.limits.cpus, spec.limits.memory_mb, spec.limits.storage_mb, spec.limits.pids) <= 0:
            reasons.append("limits must be above 0")
        reasons += self._refusals(spec, features)
        if features.notes and reasons:
            reasons += features.notes
        if reasons:
            raise SandboxRefusedError(
                f"{self.name} cannot keep what was asked for: {'; '.join(reasons)}", reasons=reasons
            )

    # Making and removing

    async def create(self, spec: Spec, *, wait: bool = True) -> LocalSandbox:
        features, capabilities = await self._probe()
        self._check(spec, features, capabilities)
        return await self._make(self._claim(spec, features), spec, features, capabilities, wait=wait)

    def _claim(self, spec: Spec, features: Features) -> Claim:
        self._made += 1
        name = f"{self.name}-{self._owner}-{self._made}"
        groups = tuple(str(path) for path in self._groups.paths(f"rollout-{name}"))
        box = self._journal.boxes / name
        limits = spec.limits
        marked = not features.namespaces
        return Claim(name, self.name, self._owner, str(box), limits.cpus, limits.memory_mb, groups, marked)

    async def _make(
        self, claim: Claim, spec: Spec, features: Features, capabilities: Capabilities, *, wait: bool | None
    ) -> LocalSandbox:
        proxy = None
        sandbox_init = None
        try:
            if wait is not None:
                await self._reserve(claim, wait)
            else:  # a probe: it is small, and must not wait for room
                await in_thread(self._journal.write, claim, durable=False)
            config = await in_thread(self._lay_out, claim, spec, features)
            sandbox_init = (await self._living_zygote()).make(config)
            listener = await sandbox_init.made
            if listener is not None:
                proxy = Proxy(Allowlist(spec.network.hosts))
                await proxy.start(listener)
        except BaseException as error:
            if sandbox_init is not None:
                await asyncio.shield(sandbox_init.end(END_S))
            await asyncio.shield(self._clear(claim))
            if isinstance(error, OSError):
                raise SandboxCreateError(f"the sandbox could not be made: {error}") from error
            raise
        sandbox = LocalSandbox(
            claim, spec, capabilities, self._setting(claim, spec, features, capabilities), sandbox_init, proxy
        )
        self._sandboxes.add(sandbox)
        sandbox.watch()
        return sandbox

    async def _living_zygote(self) -> Zygote:
        """A new one where the last was killed: its sandboxes are gone, those to come need not be."""
        async with self._starting:
            if not self._zygote.alive:
                await self._zygote.stop()
                self._zygote = Zygote(self._journal.state, self._owner)
                await self._zygote.start()
            return self._zygote

    async def _reserve(self, claim: Claim, wait: bool) -> None:
        if not wait:
            if self._turn.locked() or not await self._try_to_reserve(claim):
                raise SandboxNoRoomError
            return
        looked = time.monotonic()
        async with self._turn:
            while True:
                self._freed.clear()
                if await self._try_to_reserve(claim):
                    return
                if time.monotonic() - looked > _REAP_EVERY_S:
                    await self.reap()
                    looked = time.monotonic()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._freed.wait(), _ROOM_S)

    async def _try_to_reserve(self, claim: Claim) -> bool:
        return await in_thread(self._journal.reserve, claim, self._capacity, durable=False)

    def _lay_out(self, claim: Claim, spec: Spec, features: Features) -> dict[str, Any]:
        limits = spec.limits
        box = Path(claim.box)
        for directory in (box, box / "in", box / "out"):
            directory.mkdir(mode=0o700)
        groups: list[Path] = []
        if claim.cgroups:
            name = f"rollout-{claim.name}"
            memory = limits.memory_mb * MIB
            groups = cgroups.make(self._groups, name, cpus=limits.cpus, memory=memory, pids=limits.pids)
        root = os.geteuid() == 0
        return {
            "name": claim.name,
            "hostname": claim.name,
            "box": str(box / "in"),
            "namespaces": features.namespaces,
            "network": spec.network.mode,
            "proxy_port": PROXY_PORT,
            "uplink": {
                "nameservers": uplink.own_resolv_conf(uplink.host_resolv_conf())[1],
                "listed": list(spec.network.hosts),
            },
            "cgroups": [str(group) for group in groups],
            "map": None if root else self._map(),
            "drop": False,
            "bubblewrap": None,
            "host": None,
            **self._prepare(box, spec, features),
        }

    def _map(self) -> tuple[int, int]:
        """Who a worker that is not root is in its sandboxes: (user, group)."""
        return os.geteuid(), os.getegid()

    def _may_be(self, user: str | int, capabilities: Capabilities) -> bool:
        """Whether commands can run as this user."""
        number = os.geteuid() if os.geteuid() == 0 else self._map()[0]
        return capabilities.users or str(user) == str(number) or (number == 0 and user == "root")

    def _setting(self, claim: Claim, spec: Spec, features: Features, capabilities: Capabilities) -> Setting:
        home = self._home(Path(claim.box), features)
        environment = {"PATH": self._path(), "HOME": home, "LANG": "C.UTF-8", MARK: claim.name}
        if spec.network.mode == "allowlist":
            url = f"http://127.0.0.1:{PROXY_PORT}"
            for name in ("http_proxy", "https_proxy"):  # a convenience: what does not use it reaches nobody
                environment[name] = environment[name.upper()] = url
        environment.update(spec.env)
        rlimits = self._rlimits(spec, features)
        return Setting(
            home=home,
            environment=environment,
            rlimits=rlimits,
            price=self._price,
            may_be=lambda user: self._may_be(user, capabilities),
            remove=self._remove,
        )

    def _rlimits(self, spec: Spec, features: Features) -> dict[str, int]:
        how = self.enforcement(features)
        limits = {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": spec.limits.storage_mb * MIB}
        if how["memory"] == "process":
            limits["RLIMIT_DATA"] = spec.limits.memory_mb * MIB
        if "pids" not in self._groups.directories and how["pids"] == "kernel":
            limits["RLIMIT_NPROC"] = spec.limits.pids + 2  # its pid 1 and the sandbox_init are of this user too
        return limits

    async def _clear(self, claim: Claim) -> None:
        """SandboxTeardownError: something is left, and the claim stays."""
        try:
            await in_thread(self._journal.clear, claim)
        except OSError as error:
            raise SandboxTeardownError(f"{claim.name} is not removed: {error}") from error
        finally:
            self._freed.set()

    async def _remove(self, sandbox: LocalSandbox, claim: Claim) -> None:
        await self._clear(claim)
        self._sandboxes.discard(sandbox)
