"""File access to a sandbox of this host: one end of a pipe is in its sandbox_init, the other here."""

from __future__ import annotations

import asyncio
import json
import os
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from rollout_worker.sandboxes import pipes, trees
from rollout_worker.sandboxes.errors import SandboxError, SandboxFileError, SandboxGoneError
from rollout_worker.sandboxes.keeping import SandboxInit, body_of
from rollout_worker.sandboxes.port import Bounds, Transfer
from rollout_worker.sandboxes.threads import in_thread

T = TypeVar("T")


class LocalFiles:
    def __init__(self, name: str, sandbox_init: SandboxInit) -> None:
        self._name = name
        self._sandbox_init = sandbox_init

    async def read(self, path: str, max_bytes: int) -> bytes:
        reader, writer = pipes.pipe()
        try:
            reading = asyncio.ensure_future(pipes.read_all(reader, max_bytes))
            try:
                await self._ask({"what": "read", "path": path, "max_bytes": max_bytes}, writer)
                return await reading
            finally:
                reading.cancel()
                await asyncio.wait([reading])
        finally:
            os.close(reader)

    async def write(self, path: str, data: bytes, mode: int) -> None:
        reader, writer = pipes.pipe()

        with os.fdopen(writer, "wb", buffering=0) as file:

            async def send() -> None:
                await pipes.write_all(file.fileno(), data)
                file.close()

            sending = asyncio.ensure_future(send())
            try:
                await self._ask({"what": "write", "path": path, "mode": mode}, reader)
            finally:
                sending.cancel()
                await asyncio.wait([sending])

    async def upload(self, source: Path, target: str) -> Transfer:
        reader, writer = pipes.pipe()

        def send() -> trees.Moved | None:
            try:
                with os.fdopen(writer, "wb") as stream:
                    return trees.pack(str(source), stream)
            except BrokenPipeError:  # the other side failed and reports why
                return None

        (sent, _), fault = await self._both(send, {"what": "unpack", "path": target}, reader)
        if fault is not None:
            raise fault
        return Transfer.of(sent) if sent else Transfer(0, 0)

    async def download(self, source: str, target: Path, bounds: Bounds) -> Transfer:
        reader, writer = pipes.pipe()

        def receive() -> trees.Moved | None:
            with os.fdopen(reader, "rb") as stream:
                moved = _unpack(stream, target, bounds)
                while stream.read(1 << 16):  # padding after the end of the archive
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

    async def names(self, paths: Sequence[str]) -> list[list[str] | None]:
        """Return the first few names in each directory."""
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        return (await self._ask({"what": "names", "path": "/", "paths": list(paths)}, nothing))["names"]

    async def _both(
        self, work: Callable[[], T], request: dict[str, Any], fd: int
    ) -> tuple[tuple[T | None, dict[str, Any] | None], SandboxError | None]:
        """Run our half of a transfer in a thread, beside the sandbox's half. Our own error is raised first."""
        ours = asyncio.ensure_future(in_thread(work))
        fault: SandboxError | None = None
        result: dict[str, Any] | None = None
        try:
            result = await self._ask(request, fd)
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

    async def _ask(self, request: dict[str, Any], fd: int) -> dict[str, Any]:
        """Send a file request to the sandbox_init, which gets `fd`; closes it here. Raises SandboxFileError."""
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
            raise SandboxFileError(f"{path} in {self._name}: {result['text']}", reason=result["error"], path=path)
        return result


def _unpack(stream: BinaryIO, target: Path, bounds: Bounds) -> trees.Moved | None:
    most, entries = bounds.max_bytes, bounds.max_entries
    try:
        return trees.unpack(stream, str(target), leave=False, max_bytes=most, max_entries=entries)
    except tarfile.ReadError:  # truncated: the other side failed and reports why
        return None
