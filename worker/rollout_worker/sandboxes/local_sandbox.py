"""A sandbox of this host, as its owner sees it: commands and files by its sandbox_init, limits, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import tarfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, ParamSpec, TypeVar

import structlog

from rollout_worker.sandboxes import cgroups, pipes, trees
from rollout_worker.sandboxes.claims import Claim
from rollout_worker.sandboxes.errors import (
    SandboxError,
    SandboxFileError,
    SandboxGoneError,
    SandboxRefusedError,
    SandboxTeardownError,
)
from rollout_worker.sandboxes.keeping import SandboxInit, body_of
from rollout_worker.sandboxes.port import MIB, Asked, Capabilities, Command, Ended, Sandbox, Spec, Transfer
from rollout_worker.sandboxes.proxy import Proxy
from rollout_worker.sandboxes.running import Running

log = structlog.get_logger()

END_S = 10.0
_KILLS = 20
_LOOK_S = 1.0  # at the storage of a sandbox, at most so often, and at most a twentieth of the time

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like asyncio.to_thread, but cancelled only once the work has ended: what it does is not left half done."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars."""

    cpu_hour: float = 0.0
    gib_hour: float = 0.0


@dataclass(frozen=True, slots=True)
class Setting:
    """What its provider gives a sandbox: of commands, the environment and limits; what is done when it is removed."""

    home: str
    environment: Mapping[str, str]
    rlimits: Mapping[str, int]
    price: Price
    may_be: Callable[[str | int], bool]
    remove: Callable[[LocalSandbox, Claim], Awaitable[None]]


class _LocalCommand:
    def __init__(self, sandbox: LocalSandbox, running: Running) -> None:
        self._sandbox = sandbox
        self._running = running
        self._hits = sandbox.hits()

    async def finish(self) -> Ended:
        answer = await self._running.finish()
        return Ended(answer.get("exit"), answer.get("signal"))

    async def drain(self) -> None:
        await self._running.drain()

    async def limit(self, ended: Ended | None) -> Literal["memory", "storage"] | None:
        storage, memory = self._sandbox.hits()
        return "storage" if storage > self._hits[0] else "memory" if memory > self._hits[1] else None

    async def close(self) -> None:
        self._sandbox.keep_draining(self._running)


class LocalSandbox(Sandbox):
    """A sandbox of this host."""

    def __init__(
        self,
        claim: Claim,
        spec: Spec,
        capabilities: Capabilities,
        setting: Setting,
        sandbox_init: SandboxInit,
        proxy: Proxy | None,
    ) -> None:
        self.name = claim.name
        self.spec = spec
        self.capabilities = capabilities
        self.home = setting.home
        self._claim = claim
        self._setting = setting
        self._sandbox_init = sandbox_init
        self._proxy = proxy
        self._box = Path(claim.box)
        self._memory_events = cgroups.memory_events(claim.groups)
        self._started = time.monotonic()
        self._ended: float | None = None
        self._stopped = False
        self._killing = asyncio.Lock()
        self._destroyed: asyncio.Task[None] | None = None
        self._storage_hit = 0
        self._storage_allowed = spec.limits.storage_mb * MIB
        self._watcher: asyncio.Task[None] | None = None
        self._strays: set[asyncio.Task[None]] = set()

    @property
    def warden_pid(self) -> int:
        """The process outside that everything in the sandbox ends with."""
        return self._sandbox_init.pid

    # Commands

    @property
    def _outputs(self) -> Path:
        return self._box / "out"

    def _check_usable(self) -> None:
        if self._stopped:
            raise SandboxGoneError(f"{self.name} was stopped")

    async def _begin(self, asked: Asked) -> Command:
        if asked.user is not None and not self._setting.may_be(asked.user):
            why = f"commands cannot run as user {asked.user} here"
            raise SandboxRefusedError(why, reasons=[why])
        body = {
            "argv": asked.words,
            "env": {**self._setting.environment, **asked.env},
            "cwd": self._absolute(asked.cwd) if asked.cwd else self.workdir,
            "user": asked.user,
            "home": "HOME" not in self.spec.env and "HOME" not in asked.env,
            "rlimits": self._setting.rlimits,
        }
        async with self._killing:  # what is begun while a kill goes on would be killed too
            pass
        return _LocalCommand(self, Running(self._sandbox_init, body, asked))

    def hits(self) -> tuple[int, int]:
        """How often the limits of storage and of memory have ended processes of it."""
        return self._storage_hit, cgroups.memory_kills(self._memory_events)

    def keep_draining(self, running: Running) -> None:
        """A process that a command left behind goes on printing: it must not be stopped by a full or a closed pipe."""
        stray = asyncio.ensure_future(running.discard())
        self._strays.add(stray)
        stray.add_done_callback(self._strays.discard)

    async def kill(self) -> None:
        async with self._killing:  # two at once would end each other
            for _ in range(_KILLS):  # the process that kills is in the sandbox, where others may kill it before it does
                answer = await self._sandbox_init.ask("kill")
                if answer.get("exit") == 0:
                    return
                if "exit" in answer:
                    break
        raise SandboxError(f"processes in {self.name} do not end")

    async def stop(self) -> None:
        self._stopped = True
        await self.kill()

    # Files

    def _absolute(self, path: str) -> str:
        if "\0" in path:
            raise SandboxFileError(f"{path!r} is no path", reason="EINVAL")
        return os.path.normpath(os.path.join(self.workdir, path)) if not path.startswith("/") else path  # noqa: PTH118

    async def read_file(self, path: str, *, max_bytes: int = 16 * MIB) -> bytes:
        reader, writer = pipes.pipe()
        try:
            reading = asyncio.ensure_future(pipes.read_all(reader, max_bytes))
            try:
                await self._files({"what": "read", "path": path, "max_bytes": max_bytes}, writer)
                return await reading
            finally:
                reading.cancel()
                await asyncio.wait([reading])
        finally:
            os.close(reader)

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        reader, writer = pipes.pipe()

        with os.fdopen(writer, "wb", buffering=0) as file:

            async def send() -> None:
                await pipes.write_all(file.fileno(), data)
                file.close()

            sending = asyncio.ensure_future(send())
            try:
                await self._files({"what": "write", "path": path, "mode": mode}, reader)
            finally:
                sending.cancel()
                await asyncio.wait([sending])

    async def upload(self, source: Path, target: str) -> Transfer:
        reader, writer = pipes.pipe()

        def send() -> trees.Moved | None:
            try:
                with os.fdopen(writer, "wb") as stream:
                    return trees.pack(str(source), stream)
            except BrokenPipeError:  # the other side has given up, and says why
                return None

        (sent, _), fault = await self._both(send, {"what": "unpack", "path": target}, reader)
        if fault is not None:
            raise fault
        return Transfer(sent.files, sent.size, tuple(sent.skipped)) if sent else Transfer(0, 0)

    async def download(
        self,
        source: str,
        target: Path,
        *,
        max_bytes: int = 4096 * MIB,
        max_entries: int | None = None,
        selection: trees.Selection | None = None,
    ) -> Transfer:
        reader, writer = pipes.pipe()

        def receive() -> trees.Moved | None:
            with os.fdopen(reader, "rb") as stream:
                moved = _unpack(stream, target, max_bytes, max_entries)
                while stream.read(1 << 16):  # what follows the archive's end
                    pass
                return moved

        wanted = None if selection is None else dataclasses.asdict(selection)
        limits = {"max_bytes": max_bytes, "max_entries": max_entries, "selection": wanted}
        request = {"what": "pack", "path": source, **limits}
        (got, result), fault = await self._both(receive, request, writer)
        if fault is not None:
            raise fault
        if got is None:
            raise SandboxFileError(f"{source} did not arrive whole", reason="EIO")
        told = result or {}
        skipped = [(name, why) for name, why in told.get("skipped", [])]
        return Transfer(got.files, got.size, (*skipped, *got.skipped), told.get("left_out", 0) + got.left_out)

    async def names(self, *paths: str) -> dict[str, list[str]]:
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        found = await self._files({"what": "names", "path": "/", "paths": [*map(self._absolute, paths)]}, nothing)
        return {path: names for path, names in zip(paths, found["names"], strict=True) if names is not None}

    async def _both(
        self, work: Callable[[], T], request: dict[str, Any], fd: int
    ) -> tuple[tuple[T | None, dict[str, Any] | None], SandboxError | None]:
        """Our half of a transfer in a thread, the sandbox's beside it. A fault of ours is raised first."""
        ours = asyncio.ensure_future(in_thread(work))
        fault: SandboxError | None = None
        result: dict[str, Any] | None = None
        try:
            result = await self._files(request, fd)
        except (SandboxFileError, SandboxGoneError) as error:
            fault = error
        finally:
            await asyncio.wait([ours])
        done = None
        try:
            done = ours.result()
        except trees.TooLargeError as error:
            raise SandboxFileError(f"{request['path']} is too large", reason=error.reason) from error
        except tarfile.TarError:
            if fault is None:
                raise
        return (done, result), fault

    async def _files(self, request: dict[str, Any], fd: int) -> dict[str, Any]:
        """Have the sandbox_init do something with files; it gets `fd`, which is closed here. SandboxFileError."""
        results, result_end = pipes.pipe()
        path = request["path"]
        try:
            try:
                body = body_of({"user": None, **request, "path": self._absolute(path)})
                try:
                    answer = self._sandbox_init.ask("files", [body, fd, result_end])
                finally:
                    os.close(body)
            finally:
                os.close(fd)
                os.close(result_end)
            said = await pipes.read_all(results)
            await answer
        finally:
            os.close(results)
        if not said:
            raise SandboxFileError(f"{path}: it was interrupted, as by a kill in the sandbox", reason="EINTR")
        result: dict[str, Any] = json.loads(said)
        if "error" in result:
            raise SandboxFileError(f"{path} in {self.name}: {result['text']}", reason=result["error"], path=path)
        return result

    # Its life

    def watch(self) -> None:
        self._watcher = asyncio.ensure_future(self._watch_storage())

    async def _watch_storage(self) -> None:
        """Ends what runs when there is more on the disk than the limit."""
        wait = _LOOK_S
        with contextlib.suppress(SandboxGoneError):
            while True:
                await asyncio.sleep(wait)
                begun = time.monotonic()
                used = await self.storage_used()
                wait = max(_LOOK_S, 20 * (time.monotonic() - begun))
                if used > self._storage_allowed:
                    self._storage_hit += 1
                    log.info("sandbox_storage_exceeded", sandbox=self.name, used_mb=used // MIB)
                    await self.kill()

    async def listen(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                answer = self._sandbox_init.ask("listen", [theirs.fileno()])
            if (await answer).get("exit") != 0:
                raise SandboxError(f"no socket could be made in {self.name}")
            _, fds, _, _ = socket.recv_fds(ours, 16, 1)
        return socket.socket(fileno=fds[0])

    async def allow_more_storage(self) -> None:
        async with self._killing:  # what is begun next is not ended with what went beyond the limit
            self._storage_allowed = await self.storage_used() + self.spec.limits.storage_mb * MIB

    async def storage_used(self) -> int:
        """Bytes on the disk."""
        reader, writer = pipes.pipe()
        try:
            try:
                answer = self._sandbox_init.ask("usage", [writer])
            finally:
                os.close(writer)
            said = await pipes.read_all(reader)
            await answer
        finally:
            os.close(reader)
        return int(json.loads(said)["size"]) if said else 0

    async def end(self) -> bool:
        """End every process for good, as well as its mounts; files stay until it is destroyed. Whether they ended."""
        self._stopped = True
        return await self._sandbox_init.end(END_S)

    async def destroy(self) -> None:
        failed = self._destroyed is not None and self._destroyed.done() and self._destroyed.exception() is not None
        if self._destroyed is None or failed:
            self._destroyed = asyncio.ensure_future(self._destroy())
        await asyncio.shield(self._destroyed)

    async def _destroy(self) -> None:
        self._ended = self._ended or time.monotonic()
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])
        if self._proxy is not None:
            await self._proxy.stop()
        ended = await self._sandbox_init.end(END_S)
        for stray in list(self._strays):
            stray.cancel()
        if self._strays:
            await asyncio.wait(list(self._strays))
        await self._setting.remove(self, self._claim)
        if not ended:
            raise SandboxTeardownError(f"processes of {self.name} do not end")

    def cost(self) -> float:
        hours = ((self._ended or time.monotonic()) - self._started) / 3600
        limits = self.spec.limits
        return hours * (
            limits.cpus * self._setting.price.cpu_hour + limits.memory_mb / 1024 * self._setting.price.gib_hour
        )


def _unpack(stream: BinaryIO, target: Path, max_bytes: int, max_entries: int | None) -> trees.Moved | None:
    try:
        return trees.unpack(stream, str(target), leave=False, max_bytes=max_bytes, max_entries=max_entries)
    except tarfile.ReadError:  # cut off: the other side failed, and says why
        return None
