"""What providers of sandboxes elsewhere share: claims, admission by count, probing and removal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from abc import abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import structlog

from rollout_worker.sandboxes.allowlist import Allowlist
from rollout_worker.sandboxes.claims import Claim, Journal
from rollout_worker.sandboxes.errors import (
    SandboxCreateError,
    SandboxError,
    SandboxNoRoomError,
    SandboxRefusedError,
    SandboxTeardownError,
)
from rollout_worker.sandboxes.local_sandbox import in_thread
from rollout_worker.sandboxes.port import Capabilities, Limits, Provider, Spec
from rollout_worker.sandboxes.remote_sandbox import RemoteSandbox

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Most:
    """What a sandbox may declare at most."""

    cpus: float
    memory_mb: int


class RemoteProvider(Provider):
    """A claim is on this host's disk before a sandbox is asked for: whoever opens a provider on the same state removes
    what a dead owner left. Providers say how one is made and removed."""

    most = Most(cpus=1024, memory_mb=16 << 20)

    def __init__(self, state: Path, *, max_sandboxes: int) -> None:
        self._journal = Journal(state.absolute() / self.name)
        self._owner = secrets.token_hex(6)
        self._lock = -1
        self._made = 0
        self._room = asyncio.Semaphore(max_sandboxes)
        self._probing = asyncio.Lock()
        self._found: Capabilities | None = None
        self._sandboxes: set[RemoteSandbox] = set()

    @property
    def owner(self) -> str:
        return self._owner

    async def open(self) -> None:
        try:
            await in_thread(self._journal.prepare)
            self._lock = await in_thread(self._journal.hold_owner, self._owner)
        except OSError as error:
            raise SandboxCreateError(f"{self._journal.state} cannot hold claims: {error.strerror}") from error
        try:
            await self._connect()
            await self.reap()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        results = await asyncio.gather(*(s.destroy() for s in list(self._sandboxes)), return_exceptions=True)
        await self._disconnect()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
            if not await in_thread(self._journal.of, self._owner):
                await in_thread(self._journal.drop_owner, self._owner)
        for fault in results:
            if isinstance(fault, BaseException):
                raise fault

    async def reap(self) -> None:
        """Remove what dead owners left on this state directory."""
        for claim in await in_thread(self._journal.lost):
            try:
                await self._remove(claim)
                await in_thread(self._journal.clear, claim)
            except (SandboxError, OSError) as error:
                log.warning("sandbox_not_reaped", sandbox=claim.name, error=str(error))

    async def _connect(self) -> None: ...

    async def _disconnect(self) -> None: ...

    async def _identity(self) -> str:
        """Of this state directory, made once: hosts never take each other's sandboxes for lost."""
        return await in_thread(_identity, self._journal.state / "id")

    # What there is

    async def probe(self) -> Capabilities:
        async with self._probing:
            if self._found is None:
                self._found = await self._find()
            return self._found

    @abstractmethod
    async def _find(self) -> Capabilities: ...

    @abstractmethod
    def _refusals(self, spec: Spec) -> list[str]:
        """What this provider cannot keep, beyond its capabilities; a sentence each."""

    def _check(self, spec: Spec, found: Capabilities) -> None:
        reasons: list[str] = []
        if spec.network.mode not in found.networks:
            reasons.append(f"network `{spec.network.mode}` cannot be enforced by {self.name}")
        elif spec.network.mode == "allowlist":
            reasons += Allowlist.faults(spec.network.hosts)
        if spec.directories and not found.private_directories:
            reasons.append(f"{', '.join(spec.directories)} cannot be private: sandboxes share a file system")
        if spec.mounts:
            reasons.append("files of this host cannot be mounted elsewhere: upload them instead")
        for path in (*spec.directories, *(m.target for m in spec.mounts), *([spec.workdir] if spec.workdir else [])):
            if not path.startswith("/") or path != os.path.normpath(path) or path == "/" or "\0" in path:
                reasons.append(f"{path!r} is not an absolute path below / without . and ..")
        for name in sorted(spec.require):
            if found.limits[name] != "kernel":
                reasons.append(f"the limit on {name} is not kept by the kernel here")
        reasons += self._limits_refused(spec.limits)
        reasons += self._refusals(spec)
        if reasons:
            told = f"{self.name} cannot keep what was asked for: {'; '.join(reasons)}"
            raise SandboxRefusedError(told, reasons=reasons)

    def _limits_refused(self, limits: Limits) -> list[str]:
        reasons: list[str] = []
        if limits.cpus > self.most.cpus:
            reasons.append(f"{limits.cpus:g} cpus are more than a sandbox can have, {self.most.cpus:g}")
        if limits.memory_mb > self.most.memory_mb:
            reasons.append(f"{limits.memory_mb} MB are more than a sandbox can have, {self.most.memory_mb}")
        if min(limits.cpus, limits.memory_mb, limits.storage_mb, limits.pids) <= 0:
            reasons.append("limits must be above 0")
        return reasons

    # Making and removing

    async def create(self, spec: Spec, *, wait: bool = True) -> RemoteSandbox:
        found = await self.probe()
        self._check(spec, found)
        if not wait and self._room.locked():
            raise SandboxNoRoomError
        return await self._make(spec, found, wait=wait)

    async def _make(self, spec: Spec, found: Capabilities, *, wait: bool = True) -> RemoteSandbox:
        await self._room.acquire()
        claim = self._claim(spec)
        try:
            await in_thread(self._journal.write, claim)
            await in_thread(os.makedirs, claim.box, 0o700)
            sandbox = await self._start(claim, spec, found, wait=wait)
        except BaseException as error:
            try:
                await asyncio.shield(self._give_up(claim))
            finally:
                self._room.release()
            if isinstance(error, OSError):
                raise SandboxCreateError(f"{claim.name} could not be made: {error}") from error
            raise
        self._sandboxes.add(sandbox)
        return sandbox

    def _claim(self, spec: Spec) -> Claim:
        self._made += 1
        name = f"{self.name}-{self._owner}-{self._made}"
        return Claim(
            name, self.name, self._owner, str(self._journal.boxes / name), spec.limits.cpus, spec.limits.memory_mb
        )

    async def _give_up(self, claim: Claim) -> None:
        try:
            await self._remove(claim)
            await in_thread(self._journal.clear, claim)
        except (SandboxError, OSError) as error:  # why it was not made is what matters; its claim stays
            log.warning("sandbox_not_removed", sandbox=claim.name, error=str(error))

    async def _end(self, claim: Claim, sandbox: RemoteSandbox) -> None:
        """SandboxTeardownError: something is left, and the claim stays."""
        await self._remove(claim)
        try:
            await in_thread(self._journal.clear, claim)
        except OSError as error:
            raise SandboxTeardownError(f"{claim.name} is not removed: {error}") from error
        if sandbox in self._sandboxes:
            self._sandboxes.discard(sandbox)
            self._room.release()

    @abstractmethod
    async def _start(self, claim: Claim, spec: Spec, found: Capabilities, *, wait: bool) -> RemoteSandbox:
        """SandboxCreateError; then `_remove` is called."""

    @abstractmethod
    async def _remove(self, claim: Claim) -> None:
        """Whatever there is of the claim's sandbox; nothing is well too. SandboxTeardownError."""

    @contextlib.asynccontextmanager
    async def _trial(self, spec: Spec, found: Capabilities) -> AsyncGenerator[RemoteSandbox]:
        """A sandbox to find out with."""
        sandbox = await self._make(spec, found)
        try:
            yield sandbox
        finally:
            await sandbox.destroy()


def _identity(path: Path) -> str:
    with contextlib.suppress(FileExistsError), path.open("x") as file:
        file.write(secrets.token_hex(8))
    return path.read_text()
