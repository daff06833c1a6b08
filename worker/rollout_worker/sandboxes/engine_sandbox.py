"""A sandbox that is a container, as its owner sees it."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import structlog

from rollout_worker.sandboxes.engine_api import (
    Engine,
    EngineError,
    EngineUnreachableError,
    as_sandbox_error,
    of_sandbox,
)
from rollout_worker.sandboxes.engine_exec import Attached
from rollout_worker.sandboxes.engine_files import EngineFiles
from rollout_worker.sandboxes.errors import SandboxEndedError, SandboxError, SandboxGoneError
from rollout_worker.sandboxes.open_files import unlinked_size
from rollout_worker.sandboxes.pid_namespaces import beside, end_others
from rollout_worker.sandboxes.port import Asked, Command, Ended, Made
from rollout_worker.sandboxes.threads import in_thread
from rollout_worker.sandboxes.watched import WatchedSandbox

log = structlog.get_logger()

# Engines report a wrong working directory in many ways, so the shell changes to it instead.
_ENTER = 'echo +; cd -- "$1" || exit 126; shift; exec "$@"'
_OOM_KILLS = (
    "for f in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do"
    " [ -r $f ] && sed -n 's/^oom_kill //p' $f && exit; done; echo 0"
)
_DRAIN_S = 5.0
_END_S = 2.0
_NO_START = 126
_KILLED = 128 + 9
_SIGKILL = 9
_NOT_RUNNABLE = re.compile(r"no such file|not found|permission denied|exec format|not a directory", re.IGNORECASE)
_LOOKS, _LOOK_AGAIN_S = 4, 0.1


@dataclass(frozen=True, slots=True)
class Container:
    """What the provider knows of a container. `user` runs commands by default.

    `restarts` says that the image's own processes belong to it and are started again after a kill. `begin` is called
    once it runs again.
    """

    engine: Engine
    user: str
    restarts: bool
    begin: Callable[[EngineSandbox], Awaitable[None]]


def _ended(name: str, state: Mapping[str, Any]) -> SandboxGoneError:
    """Return why the container has stopped. Whoever ends one from outside kills it; inside, only the kernel can kill
    the first process, for memory."""
    code = state.get("ExitCode")
    if state.get("OOMKilled"):
        return SandboxEndedError(f"{name} is gone: its container was out of memory")
    if code != _KILLED:
        return SandboxEndedError(f"{name} is gone: its container ended by itself, with exit code {code}")
    return SandboxGoneError(f"{name} is gone: its container was killed")


class _EngineCommand:
    def __init__(self, sandbox: EngineSandbox, running: asyncio.Task[int | None]) -> None:
        self._sandbox = sandbox
        self._running = running
        self._storage_hits = sandbox.storage_hits

    async def finish(self) -> Ended:
        try:
            code = await asyncio.shield(self._running)
        except asyncio.CancelledError:
            if self._sandbox.gone and self._running.cancelled():
                raise SandboxGoneError(f"{self._sandbox.name} was destroyed") from None
            raise
        # The engine reports a signal as shells do.
        if code is None or 128 < code <= 128 + 64:
            return Ended(signal=9 if code is None else code - 128)
        return Ended(code)

    async def drain(self) -> None:
        await asyncio.wait([self._running], timeout=_DRAIN_S)  # `on_output` may be stuck

    async def limit(self, ended: Ended | None) -> Literal["memory", "storage"] | None:
        if self._sandbox.storage_hits > self._storage_hits:
            return "storage"
        hit = ended is not None and ended.code != 0 and await self._sandbox.memory_was_hit()
        if ended is not None and ended.signal == _SIGKILL:
            await self._sandbox.check_lives()
        return "memory" if hit else None

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)


class EngineSandbox(WatchedSandbox):
    """A sandbox in a container of the same name."""

    look_s = 2.0

    def __init__(self, made: Made, container: Container) -> None:
        super().__init__(made, EngineFiles(container.engine, made.name))
        self._container = container
        self._engine = container.engine
        self._kills = 0
        self._oom_kills = 0
        self._running: set[asyncio.Task[int | None]] = set()

    # Commands

    async def _begin(self, asked: Asked) -> Command:
        running = asyncio.ensure_future(self._run(asked))
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return _EngineCommand(self, running)

    async def _run(self, asked: Asked) -> int | None:
        """Run a command; return its exit code, or None if it was killed."""
        where = self._absolute(asked.cwd) if asked.cwd else self.workdir
        words = ["/bin/sh", "-c", _ENTER, "sh", where, *asked.words]
        try:
            attached, code = await self._once(words, asked)
            if not attached.begun and await self._engine.is_full(self.name, self.spec.limits.pids):
                # Nothing can be started in it any more, not even what the worker runs in it.
                log.warning("sandbox_full", sandbox=self.name)
                await self.kill()
                attached, code = await self._once(words, asked)
        except EngineUnreachableError as error:
            raise as_sandbox_error(self.name, error) from error
        except EngineError as error:
            await self.check_lives()
            asked.captures["stderr"].feed(f"{error.message}\n".encode())  # for example an unknown user
            return _NO_START
        if code is None or code > 128:
            # A command is killed with its container, and an engine may report the command first.
            for _ in range(_LOOKS if code in (None, 128 + 9) else 1):
                await self.check_lives()
                await asyncio.sleep(_LOOK_AGAIN_S)
        if attached.begun or code is None:
            return code
        asked.captures["stderr"].feed(attached.said)
        return _NO_START

    async def _once(self, words: list[str], asked: Asked) -> tuple[Attached, int | None]:
        """Run a command once; return it and its exit code, or None if it was killed."""
        kills = self._kills
        user = self._container.user if asked.user is None else str(asked.user)
        made = await self._engine.exec(self.name, words, env=asked.env, user=user, stdin=asked.stdin is not None)
        attached = Attached(self._engine, made, asked)
        code = await attached.finish()
        return attached, code if self._kills == kills else None

    @property
    def gone(self) -> bool:
        return self._ended is not None

    async def memory_was_hit(self) -> bool:
        before = self._oom_kills
        with contextlib.suppress(SandboxError):
            self._oom_kills = await self._count_oom_kills()
        return self._oom_kills > before

    async def _count_oom_kills(self) -> int:
        with of_sandbox(self.name):
            _, said = await self._engine.run(self.name, _OOM_KILLS)
        found = re.search(rb"\d+", said)
        return int(found[0]) if found else 0

    async def check_lives(self) -> None:
        """Raise SandboxGoneError if the container no longer runs; first wait for a `kill`, which restarts it."""
        async with self._killing:
            if self._stopped:
                raise SandboxGoneError(f"{self.name} was stopped")
            with of_sandbox(self.name):
                shown = await self._engine.show(self.name)
            if not shown["State"]["Running"]:
                raise _ended(self.name, shown["State"])

    async def kill(self) -> None:
        """Kill all processes from outside where they are visible. Otherwise, or if some remain, kill and restart the
        container, so that the kernel ends everything in it."""
        async with self._killing:
            if self.gone:
                raise SandboxGoneError(f"{self.name} was destroyed")
            with of_sandbox(self.name):
                shown = await self._engine.show(self.name)
                if not self._stopped and not shown["State"]["Running"]:
                    raise _ended(self.name, shown["State"])
                self._kills += 1
                first = int(shown["State"].get("Pid") or 0)
                stays = self._is_seen and not self._stopped and not self._container.restarts
                if stays and await in_thread(end_others, first, _END_S):
                    return
                await self._engine.kill(self.name)
                if not self._stopped:
                    await self._start()
                    self._oom_kills = 0
                    await self._container.begin(self)

    async def _start(self) -> None:
        """Start the container. Raises SandboxEndedError if what its first process needs was removed."""
        try:
            await self._engine.start(self.name)
        except EngineError as error:
            if not _NOT_RUNNABLE.search(error.message):
                raise
            raise SandboxEndedError(f"{self.name} does not start any more: {error.message}") from error

    # Its life

    @property
    def _may_write(self) -> bool:
        return bool(self._running)

    @property
    def _is_seen(self) -> bool:
        """Whether its processes are on this machine and we are root, as for the proxy of an allowlist."""
        return "allowlist" in self.capabilities.networks

    async def storage_used(self) -> int:
        """Return bytes used, with removed files that are still open where the processes are visible."""
        with of_sandbox(self.name):
            size = await self._engine.size(self.name)
            if not self._is_seen:
                return size
            pid = int((await self._engine.show(self.name))["State"]["Pid"])
        return size + await in_thread(lambda: unlinked_size(beside(pid)))

    async def _destroy(self) -> None:
        async with self._killing:
            pass
        await super()._destroy()
        if self._running:
            await asyncio.wait(list(self._running), timeout=_DRAIN_S)
