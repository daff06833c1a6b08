"""A sandbox of this host, as its owner sees it: commands and files by its sandbox_init, limits, and its end."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

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
from rollout_worker.sandboxes.port import Asked, Bounds, Command, Ended, Made, Transfer
from rollout_worker.sandboxes.proxy import Proxy
from rollout_worker.sandboxes.running import Running
from rollout_worker.sandboxes.threads import in_thread
from rollout_worker.sandboxes.watched import WatchedSandbox

T = TypeVar("T")

END_S = 10.0
_KILLS = 20


@dataclass(frozen=True, slots=True)
class Setting:
    """What its provider gives the commands of a sandbox. `may_be`: whether they can run as this user."""

    environment: Mapping[str, str]
    rlimits: Mapping[str, int]
    may_be: Callable[[str | int], bool]


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


class LocalSandbox(WatchedSandbox):
    """A sandbox of this host."""

    look_s = 1.0

    def __init__(
        self, made: Made, claim: Claim, setting: Setting, sandbox_init: SandboxInit, proxy: Proxy | None
    ) -> None:
        super().__init__(replace(made, out=made.out / "out"))
        self._setting = setting
        self._sandbox_init = sandbox_init
        self._proxy = proxy
        self._memory_events = cgroups.memory_events(claim.groups)
        self._strays: set[asyncio.Task[None]] = set()
        self.watch()

    @property
    def warden_pid(self) -> int:
        """The process outside that everything in the sandbox ends with."""
        return self._sandbox_init.pid

    @property
    def _is_lost(self) -> bool:
        return self._sandbox_init.gone.done()

    # Commands

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
        return self.storage_hits, cgroups.memory_kills(self._memory_events)

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

    # Files

    async def _read(self, path: str, max_bytes: int) -> bytes:
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

    async def _write(self, path: str, data: bytes, mode: int) -> None:
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

    async def _upload(self, source: Path, target: str) -> Transfer:
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
        return Transfer.of(sent) if sent else Transfer(0, 0)

    async def _download(self, source: str, target: Path, bounds: Bounds) -> Transfer:
        reader, writer = pipes.pipe()

        def receive() -> trees.Moved | None:
            with os.fdopen(reader, "rb") as stream:
                moved = _unpack(stream, target, bounds)
                while stream.read(1 << 16):  # what follows the archive's end
                    pass
                return moved

        request = {"what": "pack", "path": source, **asdict(bounds)}
        (got, result), fault = await self._both(receive, request, writer)
        if fault is not None:
            raise fault
        if got is None:
            raise SandboxFileError(f"{source} did not arrive whole", reason="EIO")
        told = result or {}
        skipped = [(name, why) for name, why in told.get("skipped", [])]
        return Transfer.of(got, trees.Moved(skipped=skipped, left_out=told.get("left_out", 0)))

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
                body = body_of({"user": None, **request})
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

    async def listen(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                answer = self._sandbox_init.ask("listen", [theirs.fileno()])
            if (await answer).get("exit") != 0:
                raise SandboxError(f"no socket could be made in {self.name}")
            _, fds, _, _ = socket.recv_fds(ours, 16, 1)
        return socket.socket(fileno=fds[0])

    # Its life

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

    async def _destroy(self) -> None:
        if self._proxy is not None:
            await self._proxy.stop()
        ended = await self._sandbox_init.end(END_S)
        for stray in list(self._strays):
            stray.cancel()
        if self._strays:
            await asyncio.wait(list(self._strays))
        await super()._destroy()
        if not ended:
            raise SandboxTeardownError(f"processes of {self.name} do not end")


def _unpack(stream: BinaryIO, target: Path, bounds: Bounds) -> trees.Moved | None:
    most, entries = bounds.max_bytes, bounds.max_entries
    try:
        return trees.unpack(stream, str(target), leave=False, max_bytes=most, max_entries=entries)
    except tarfile.ReadError:  # cut off: the other side failed, and says why
        return None
