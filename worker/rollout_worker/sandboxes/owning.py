"""The common part of our providers: claims on disk, refusals, admission, creation and removal.

Whoever opens a provider on the same state directory removes what a dead owner left. A provider says what works here
(`_find`), and how one sandbox is made and removed (`_start`, `_remove`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from rollout_worker.sandboxes.allowlist import Allowlist
from rollout_worker.sandboxes.claims import Capacity, Claim, Journal
from rollout_worker.sandboxes.errors import (
    SandboxCreateError,
    SandboxError,
    SandboxNoRoomError,
    SandboxRefusedError,
    SandboxTeardownError,
)
from rollout_worker.sandboxes.port import Capabilities, Made, Price, Provider, Sandbox, Spec
from rollout_worker.sandboxes.threads import in_thread

log = structlog.get_logger()

S = TypeVar("S", bound=Sandbox)
PROXY_PORT = 3128
_ROOM_S = 0.1  # between counts of claims: owners in other processes do not signal when they free capacity
_REAP_EVERY_S = 5.0
_KEPT = {"process": "for each process only", "watched": "by looking now and then", "no": "not at all"}


class OwningProvider(Provider, Generic[S]):
    durable_claims = True
    """Whether sandboxes outlive this machine, so that a claim must be on disk first."""
    shares_room = True
    """Whether all owners on the state directory share capacity, so that waiting for room also reaps dead ones."""

    def __init__(self, state: Path, capacity: Capacity, price: Price | None = None) -> None:
        """`capacity` bounds what sandboxes with claims in `state` declare together; others wait."""
        self._journal = Journal(state)
        self._capacity = capacity
        self._price = price or Price()
        self._owner = secrets.token_hex(6)
        self._lock = -1
        self._made = 0
        self._probing = asyncio.Lock()
        self._found: Capabilities | None = None
        self._turn = asyncio.Lock()  # FIFO, so that small sandboxes do not starve a large one
        self._freed = asyncio.Event()
        self._sandboxes: dict[str, S] = {}

    @property
    def state(self) -> Path:
        return self._journal.state

    @property
    def owner(self) -> str:
        return self._owner

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    async def open(self) -> None:
        """Reap what dead owners left. Raises SandboxRefusedError, SandboxCreateError."""
        try:
            await in_thread(self._journal.prepare)
            await in_thread(self._hold)
        except OSError as error:
            raise SandboxCreateError(f"{self.state} cannot hold sandboxes: {error.strerror}") from error
        try:
            await self._connect()
            await self.reap()
        except BaseException:
            await self.close()
            raise

    def _hold(self) -> None:
        """Hold the owner lock: claims live as long as this process."""
        self._lock = self._journal.hold_owner(self._owner)

    async def close(self) -> None:
        ending = [sandbox.destroy() for sandbox in self._sandboxes.values()]
        faults = [fault for fault in await asyncio.gather(*ending, return_exceptions=True) if fault is not None]
        await self._disconnect(cleared=not faults)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
            if not await in_thread(self._journal.of, self._owner):
                await in_thread(self._journal.drop_owner, self._owner)
        for fault in faults:
            raise fault

    async def _connect(self) -> None: ...

    async def _disconnect(self, *, cleared: bool) -> None:
        """Disconnect. `cleared` says whether no sandbox is left."""

    async def reap(self) -> None:
        """Remove what dead owners left on this state directory."""
        for claim in await in_thread(self._journal.lost):
            try:
                await self._clear(claim)
            except SandboxTeardownError as error:
                log.warning("sandbox_not_reaped", sandbox=claim.name, error=error.message)

    async def _is_dead(self, owner: str) -> bool:
        return owner != self._owner and await in_thread(self._journal.is_dead, owner)

    # Probing

    async def probe(self) -> Capabilities:
        async with self._probing:
            if self._found is None or self._may_find_more:
                self._found = await self._find()
            return self._found

    @property
    def _may_find_more(self) -> bool:
        return False

    @abstractmethod
    async def _find(self) -> Capabilities: ...

    @abstractmethod
    def _refusals(self, spec: Spec) -> list[str]:
        """Return what this provider cannot enforce beyond its capabilities, one sentence each."""

    def _why_less(self) -> Sequence[str]:
        """Return why this provider can do less here than elsewhere, to be reported with a refusal."""
        return ()

    def _check(self, spec: Spec, found: Capabilities) -> None:
        reasons: list[str] = []
        if spec.network.mode not in found.networks:
            reasons.append(f"network `{spec.network.mode}` cannot be enforced here")
        else:
            reasons += Allowlist.faults(spec.network.hosts)
        if spec.directories and not found.private_directories:
            reasons.append(f"{', '.join(spec.directories)} cannot be private here: sandboxes share a file system")
        if spec.mounts and not found.mounts:
            reasons.append("files of this host cannot be mounted here: upload them instead")
        for path in (*spec.directories, *(m.target for m in spec.mounts), *([spec.workdir] if spec.workdir else [])):
            if not path.startswith("/") or path != os.path.normpath(path) or path == "/" or "\0" in path:
                reasons.append(f"{path!r} is not an absolute path below / without . and ..")
        reasons += [f"there is no {m.source} to mount" for m in spec.mounts if not m.source.exists()]
        for name in sorted(spec.require):
            if found.limits[name] != "kernel":
                reasons.append(f"the limit on {name} is kept {_KEPT[found.limits[name]]} here")
        limits, most = spec.limits, self._capacity
        if limits.cpus > most.cpus:
            reasons.append(f"{limits.cpus:g} cpus are more than the {most.cpus:g} that {self.name} sandboxes can have")
        if limits.memory_mb > most.memory_mb:
            reasons.append(
                f"{limits.memory_mb} MB are more than the {most.memory_mb} MB that {self.name} sandboxes can have"
            )
        if min(limits.cpus, limits.memory_mb, limits.storage_mb, limits.pids) <= 0:
            reasons.append("limits must be above 0")
        reasons += self._refusals(spec)
        if reasons:
            reasons += self._why_less()
            told = f"{self.name} cannot keep what was asked for: {'; '.join(reasons)}"
            raise SandboxRefusedError(told, reasons=reasons)

    # Making and removing

    async def create(self, spec: Spec, *, wait: bool = True) -> S:
        found = await self.probe()
        self._check(spec, found)
        return await self._make(spec, found, wait=wait)

    async def _make(self, spec: Spec, found: Capabilities, *, wait: bool | None) -> S:
        """Make a sandbox. `wait` is None for a probe, which is small and must not wait for room."""
        claim = self._claim(spec)
        begun = False
        try:
            if wait is None:
                await in_thread(self._journal.write, claim, durable=self.durable_claims)
            else:
                await self._reserve(claim, wait)
            begun = True
            sandbox = await self._start(claim, spec, found, wait=wait is not False)
        except BaseException as error:
            await asyncio.shield(self._give_up(claim, begun=begun))
            if isinstance(error, OSError):
                raise SandboxCreateError(f"{claim.name} could not be made: {error}") from error
            raise
        self._sandboxes[claim.name] = sandbox
        return sandbox

    @contextlib.asynccontextmanager
    async def _trial(self, spec: Spec, found: Capabilities) -> AsyncGenerator[S]:
        """Make a sandbox for probing."""
        async with await self._make(spec, found, wait=None) as sandbox:
            yield sandbox

    def _claim(self, spec: Spec) -> Claim:
        self._made += 1
        name = f"{self.name}-{self._owner}-{self._made}"
        box = str(self._journal.boxes / name)
        return Claim(name, self.name, self._owner, box, spec.limits.cpus, spec.limits.memory_mb)

    def _known(self, claim: Claim, spec: Spec, found: Capabilities, home: str) -> Made:
        """Return what is known of a running sandbox."""
        price = self._price.per_hour(spec.limits)
        return Made(claim.name, spec, found, home, Path(claim.box), price, partial(self._clear, claim))

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
                if self.shares_room and time.monotonic() - looked > _REAP_EVERY_S:
                    await self.reap()
                    looked = time.monotonic()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._freed.wait(), _ROOM_S)

    async def _try_to_reserve(self, claim: Claim) -> bool:
        return await in_thread(self._journal.reserve, claim, self._capacity, durable=self.durable_claims)

    @abstractmethod
    async def _start(self, claim: Claim, spec: Spec, found: Capabilities, *, wait: bool) -> S:
        """Make what is claimed; its directory on this host exists. After any exception `_remove` is called.

        Raises SandboxCreateError, SandboxRefusedError or OSError.
        """

    async def _remove(self, claim: Claim) -> None:
        """Remove what exists of the claim's sandbox, if anything, but not its directory. Raises SandboxError."""

    async def _clear(self, claim: Claim, *, begun: bool = True) -> None:
        """Remove a claim and, if `begun`, its sandbox. Raises SandboxTeardownError, and keeps the claim, if something
        is left."""
        try:
            if begun:
                await self._remove(claim)
            await in_thread(self._journal.clear, claim)
        except SandboxTeardownError:
            raise
        except (SandboxError, OSError) as error:
            raise SandboxTeardownError(f"{claim.name} is not removed: {error}") from error
        self._sandboxes.pop(claim.name, None)
        self._free(claim)

    async def _give_up(self, claim: Claim, *, begun: bool) -> None:
        try:
            await self._clear(claim, begun=begun)
        except SandboxTeardownError as error:  # the first error matters more; the claim stays
            log.warning("sandbox_not_removed", sandbox=claim.name, error=error.message)
            self._free(claim)

    def _free(self, claim: Claim) -> None:
        """Signal that there may be room again."""
        self._freed.set()


def identity(state: Path) -> str:
    """Return the id of a state directory, made once, so that hosts never reap each other's sandboxes."""
    path = state / "id"
    with contextlib.suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
        file.write(secrets.token_hex(8))
    return path.read_text(encoding="utf-8")


def proxy_environment() -> dict[str, str]:
    """Return proxy variables for convenience: what does not use an allowlist's proxy reaches nothing."""
    url = f"http://127.0.0.1:{PROXY_PORT}"
    return {name: url for low in ("http_proxy", "https_proxy") for name in (low, low.upper())}
