"""The parts of cases: a bench with a provider, and ways for a case to report a fault."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollout_worker.sandboxes.engine_provider import EngineProvider
from rollout_worker.sandboxes.errors import (
    SandboxError,
)
from rollout_worker.sandboxes.local import LocalProvider
from rollout_worker.sandboxes.local_sandbox import LocalSandbox
from rollout_worker.sandboxes.port import (
    MIB,
    Capabilities,
    Limits,
    Network,
    Provider,
    Sandbox,
    Spec,
)

PATIENCE_S = 60.0  # for what a case waits for; busy machines are slow
SETTLE_S = 0.25  # in which something that still ran would have shown it


class NotApplicableError(Exception):
    """The provider does not claim to do what this case tests."""


class NotConformingError(AssertionError):
    """The provider does not do what it must."""


@dataclass
class Bench:
    """An open provider, and what cases need beside it.

    `address` is where sandboxes with network `host` find a server of this machine; None if nowhere. `own_address` is an
    address of this machine by which those with `public` reach it if it is listed; None if there is none.
    `host_directory` returns where this host has a sandbox's files, if it has them. `kill_from_outside` ends a sandbox
    as a fault would. `proxied_here` says that the proxy of an allowlist is in this process, `counts_unlinked` that
    files removed while open count towards the storage limit, `public_is_apart` that a sandbox with network `public` has
    one of its own that does not lead to this machine. `large` is the size of the largest output in bytes.
    """

    provider: Provider
    scratch: Path
    address: str | None = "127.0.0.1"
    own_address: str | None = None
    host_directory: Callable[[Sandbox], Path] | None = None
    kill_from_outside: Callable[[Sandbox], None] | None = None
    proxied_here: bool = False
    counts_unlinked: bool = False
    public_is_apart: bool = False
    large: int = 200 * MIB
    _shared: Sandbox | None = field(default=None, init=False)
    _count: int = field(default=0, init=False)

    async def capabilities(self) -> Capabilities:
        return await self.provider.probe()

    async def has_public_apart(self) -> bool:
        return self.public_is_apart and "public" in (await self.capabilities()).networks

    async def spec(self) -> Spec:
        networks = (await self.capabilities()).networks
        network = Network("none" if "none" in networks else "host" if "host" in networks else "public")
        return Spec(network=network, limits=Limits(cpus=0.5, memory_mb=512, storage_mb=2048, pids=128))

    async def make(self, **changes: Any) -> Sandbox:
        return await self.provider.create(replace(await self.spec(), **changes))

    async def shared(self) -> Sandbox:
        """Return the sandbox shared by all cases that leave nothing relevant behind."""
        if self._shared is None:
            self._shared = await self.make()
        return self._shared

    async def forget(self) -> None:
        """Destroy the shared sandbox, after a case that may have broken it."""
        if self._shared is not None:
            await self._shared.destroy()
            self._shared = None

    def directory(self) -> Path:
        """Make a directory on this host."""
        self.scratch.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="case-", dir=self.scratch))

    async def inside(self, sandbox: Sandbox) -> str:
        """Make a directory in the sandbox."""
        self._count += 1
        path = f"{sandbox.home}/case-{self._count}"
        (await sandbox.exec(["mkdir", "-p", path])).check()
        return path


def local_bench(provider: LocalProvider, scratch: Path, *, large: int = 200 * MIB) -> Bench:
    """Return a bench for a provider of this host."""

    def host_directory(sandbox: Sandbox) -> Path:
        return provider.state / "boxes" / sandbox.name

    def kill(sandbox: Sandbox) -> None:
        if isinstance(sandbox, LocalSandbox):
            os.kill(sandbox.warden_pid, signal.SIGKILL)

    own = own_address()
    return Bench(
        provider,
        scratch,
        own_address=own,
        host_directory=host_directory,
        kill_from_outside=kill,
        proxied_here=True,
        counts_unlinked=True,
        public_is_apart=True,
        large=large,
    )


def own_address() -> str | None:
    """Return the address by which others reach this machine, or None without a route. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        found = str(probe.getsockname()[0])
        return None if found.startswith("127.") else found


def engine_bench(provider: EngineProvider, scratch: Path, *, large: int = 200 * MIB) -> Bench:
    """Return a bench for a container engine of this host."""
    killing: set[asyncio.Task[None]] = set()

    def kill(sandbox: Sandbox) -> None:
        killing.add(asyncio.ensure_future(provider.engine.kill(sandbox.name)))

    return Bench(
        provider,
        scratch,
        address=None,
        own_address=own_address(),
        kill_from_outside=kill,
        proxied_here=True,
        counts_unlinked=os.geteuid() == 0,
        public_is_apart=provider.leads_out,
        large=large,
    )


Check = Callable[[Bench], Awaitable[None]]


@dataclass(frozen=True)
class Case:
    """A conformance check. `part` is its subject, the module that it is in."""

    name: str
    part: str
    check: Check

    async def run(self, bench: Bench) -> None:
        """Run the check. Raises NotApplicableError, NotConformingError, or an unexpected error of the provider."""
        try:
            async with asyncio.timeout(2 * PATIENCE_S):
                await self.check(bench)
        except NotApplicableError:
            raise
        except BaseException:
            with contextlib.suppress(SandboxError):
                await bench.forget()
            raise


CASES: list[Case] = []


def case(check: Check) -> Check:
    CASES.append(Case(getattr(check, "__name__", "?"), check.__module__.rpartition(".")[2], check))
    return check


def on_shared(check: Callable[[Bench, Sandbox], Awaitable[None]]) -> Check:
    async def with_shared(bench: Bench) -> None:
        await check(bench, await bench.shared())

    with_shared.__name__ = getattr(check, "__name__", "?")
    with_shared.__module__ = check.__module__
    return case(with_shared)


def same(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise NotConformingError(f"{what}: {found!r}, not {expected!r}")


def true(condition: object, what: str) -> None:
    if not condition:
        raise NotConformingError(what)


def needs(condition: object, what: str) -> None:
    if not condition:
        raise NotApplicableError(what)


@contextlib.asynccontextmanager
async def raises(kind: type[SandboxError], **context: object) -> AsyncGenerator[None]:
    try:
        yield
    except kind as error:
        for name, value in context.items():
            same(error.context.get(name), value, f"{name} of the {kind.__name__}")
    else:
        raise NotConformingError(f"no {kind.__name__} was raised")


async def eventually(look: Callable[[], Awaitable[object]], what: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while not await look():
        true(time.monotonic() < until, f"not within {PATIENCE_S:.0f} s: {what}")
        await asyncio.sleep(0.02)


async def output_of(sandbox: Sandbox, command: str, **options: Any) -> str:
    return (await sandbox.exec(command, **options)).check().stdout.text().strip()


async def still_at(sandbox: Sandbox, path: str) -> None:
    """Check that nothing appends to the file any more."""
    size = len(await sandbox.read_file(path))
    await asyncio.sleep(SETTLE_S)
    same(len(await sandbox.read_file(path)), size, "something still runs: the file grew")
