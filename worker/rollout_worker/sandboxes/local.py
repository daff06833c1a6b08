"""The part common to providers of this host: limits, the zygote, commands and files. Linux only."""

from __future__ import annotations

import asyncio
import os
import sys
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from rollout.compute import cgroup as own_cgroup

from rollout_worker.sandboxes import cgroups, uplink
from rollout_worker.sandboxes.allowlist import Allowlist
from rollout_worker.sandboxes.claims import MARK, Capacity, Claim
from rollout_worker.sandboxes.errors import SandboxError, SandboxRefusedError
from rollout_worker.sandboxes.keeping import Zygote
from rollout_worker.sandboxes.local_sandbox import END_S, LocalSandbox, Setting
from rollout_worker.sandboxes.owning import PROXY_PORT, OwningProvider, proxy_environment
from rollout_worker.sandboxes.port import (
    MIB,
    Capabilities,
    Enforcement,
    LimitName,
    Limits,
    Network,
    NetworkMode,
    Price,
    Spec,
)
from rollout_worker.sandboxes.proxy import Proxy
from rollout_worker.sandboxes.threads import in_thread

NO_UPLINK = (
    "it needs /dev/net/tun (`modprobe tun`; of a container `--device /dev/net/tun`) and the right to make network "
    "namespaces; network_mode: host in a job's environment shares this host's network instead, its loopback included"
)


@dataclass(frozen=True, slots=True)
class Features:
    """The features found to work here, and why the others do not."""

    namespaces: bool
    network: bool  # a network namespace of its own
    overlay: bool
    uplink: bool = False  # and egress from it
    notes: tuple[str, ...] = ()


def host_capacity() -> Capacity:
    """Return this host's CPUs and 90 % of its memory, within the limits of this process's own control group."""
    quota = own_cgroup.cpu_limit()
    limit = own_cgroup.memory_limit()
    memory = int(psutil.virtual_memory().total)
    count = float(os.cpu_count() or 1)
    return Capacity(
        count if quota is None else min(quota, count),
        int((memory if limit is None else min(limit, memory)) * 0.9) >> 20,
    )


class LocalProvider(OwningProvider[LocalSandbox]):
    """Base of the providers of this host. A subclass says what a sandbox's sandbox_init makes."""

    durable_claims = False

    def __init__(self, state: Path, *, capacity: Capacity | None = None, price: Price | None = None) -> None:
        """`state` is a directory of this host for claims and sandboxes; providers and processes may share it.

        `capacity` bounds what sandboxes with claims there declare together; it defaults to this host's.
        """
        super().__init__(state.absolute(), capacity or host_capacity(), price)
        self._zygote = Zygote(self.state, self._owner)
        self._groups = cgroups.Place({}, False)
        self._starting = asyncio.Lock()
        self.features = Features(namespaces=False, network=False, overlay=False)

    @property
    def mount_point(self) -> Path:
        """An empty directory where sandboxes mount their roots, each in a namespace of its own."""
        return self._journal.mount_point

    @property
    def keeper_pid(self) -> int:
        return self._zygote.pid

    async def open(self) -> None:
        if sys.platform != "linux":
            why = f"{self.name} sandboxes need Linux; this is {sys.platform}"
            raise SandboxRefusedError(why, reasons=[why])
        await super().open()

    def _hold(self) -> None:
        """Do nothing: the zygote holds the lock, because it lives a little longer and cleans up."""

    async def _connect(self) -> None:
        self._groups = await in_thread(cgroups.find)
        await self._zygote.start()

    async def _disconnect(self, *, cleared: bool) -> None:
        await self._zygote.stop()

    # Probing

    async def _find(self) -> Capabilities:
        """Return the capabilities of the first of `_ways` whose sandbox runs a command."""
        notes = self._missing()
        ways: Sequence[Features] = () if notes else self._ways()
        for features in ways:
            mode = "public" if features.uplink else "none" if features.network else "host"
            self.features = features
            spec = Spec(network=Network(mode), limits=Limits(0.1, 256, 256, 64))
            try:
                async with self._trial(spec, self._describe(features)) as sandbox:
                    finished = await sandbox.exec(["/bin/sh", "-c", "exit 7"], timeout_s=10)
            except SandboxError as error:
                notes += [] if error.message in notes else [error.message]
                continue
            if finished.exit_code == 7:
                self.features = replace(features, notes=(*features.notes, *notes))
                return self._describe(self.features)
            notes.append(f"a command that was to end with 7 {finished.how}: {finished.stderr.text().strip()}")
        raise SandboxRefusedError(f"{self.name} sandboxes do not work here: {'; '.join(notes)}", reasons=notes)

    def _missing(self) -> list[str]:
        """Return what this provider needs and this host lacks, one sentence each."""
        return []

    @abstractmethod
    def _ways(self) -> Sequence[Features]:
        """Return the feature sets to try, best first."""

    @abstractmethod
    def _describe(self, features: Features) -> Capabilities: ...

    @abstractmethod
    def _prepare(self, box: Path, spec: Spec, features: Features) -> dict[str, Any]:
        """Make a sandbox's files below `box` and return its sandbox_init's config. Blocks. Raises OSError."""

    @abstractmethod
    def _home(self, box: Path, features: Features) -> str: ...

    @abstractmethod
    def _path(self) -> str:
        """Return the PATH of commands."""

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
        """Write a resolv.conf with the nameservers that the sandbox can reach."""
        text = uplink.host_resolv_conf()
        path.write_text(uplink.own_resolv_conf(text)[0] if spec.network.mode == "public" else text)

    def enforcement(self, features: Features) -> dict[LimitName, Enforcement]:
        by_group = self._groups.directories
        # RLIMIT_NPROC counts a user's processes in its user namespace, and does not apply to root (getrlimit(2)).
        nproc = features.namespaces and os.geteuid() != 0
        return {
            "cpus": "kernel" if "cpu" in by_group else "no",
            "memory": "kernel" if "memory" in by_group else "process",
            "pids": "kernel" if "pids" in by_group or nproc else "no",
            "storage": "watched",
        }

    def _why_less(self) -> Sequence[str]:
        return self.features.notes

    def _refusals(self, spec: Spec) -> list[str]:
        users = spec.user is None or self._may_be(spec.user)
        return [
            *([] if users else [f"commands cannot run as user {spec.user} here"]),
            *self._unkept(spec, self.features),
        ]

    @abstractmethod
    def _unkept(self, spec: Spec, features: Features) -> list[str]:
        """Return what this provider cannot enforce, one sentence each."""

    # Making and removing

    def _claim(self, spec: Spec) -> Claim:
        claim = super()._claim(spec)
        groups = tuple(str(path) for path in self._groups.paths(f"rollout-{claim.name}"))
        return replace(claim, cgroups=groups, marked=not self.features.namespaces)

    async def _start(self, claim: Claim, spec: Spec, found: Capabilities, *, wait: bool) -> LocalSandbox:
        config = await in_thread(self._lay_out, claim, spec, self.features)
        sandbox_init = (await self._living_zygote()).make(config)
        try:
            listener = await sandbox_init.made
            proxy = None if listener is None else Proxy(Allowlist(spec.network.hosts))
            if listener is not None and proxy is not None:
                await proxy.start(listener)
        except BaseException:
            await asyncio.shield(sandbox_init.end(END_S))
            raise
        home = self._home(Path(claim.box), self.features)
        setting = self._setting(claim, spec, home)
        return LocalSandbox(self._known(claim, spec, found, home), claim, setting, sandbox_init, proxy)

    async def _living_zygote(self) -> Zygote:
        """Return the zygote, or a new one if it was killed: its sandboxes are lost, but later ones need not be."""
        async with self._starting:
            if not self._zygote.alive:
                await self._zygote.stop()
                self._zygote = Zygote(self._journal.state, self._owner)
                await self._zygote.start()
            return self._zygote

    def _lay_out(self, claim: Claim, spec: Spec, features: Features) -> dict[str, Any]:
        limits = spec.limits
        box = Path(claim.box)
        for directory in (box / "in", box / "out"):
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
        """Return (user, group) that an unprivileged worker has in its sandboxes."""
        return os.geteuid(), os.getegid()

    def _may_be(self, user: str | int) -> bool:
        """Return whether commands can run as this user."""
        number = os.geteuid() if os.geteuid() == 0 else self._map()[0]
        many = self._found is not None and self._found.users
        return many or str(user) == str(number) or (number == 0 and user == "root")

    def _setting(self, claim: Claim, spec: Spec, home: str) -> Setting:
        environment = {"PATH": self._path(), "HOME": home, "LANG": "C.UTF-8", MARK: claim.name}
        if spec.network.mode == "allowlist":
            environment |= proxy_environment()
        return Setting({**environment, **spec.env}, self._rlimits(spec), self._may_be)

    def _rlimits(self, spec: Spec) -> dict[str, int]:
        how = self.enforcement(self.features)
        limits = {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": spec.limits.storage_mb * MIB}
        if how["memory"] == "process":
            limits["RLIMIT_DATA"] = spec.limits.memory_mb * MIB
        if "pids" not in self._groups.directories and how["pids"] == "kernel":
            limits["RLIMIT_NPROC"] = spec.limits.pids + 2  # its pid 1 and the sandbox_init run as this user too
        return limits
