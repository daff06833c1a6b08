"""Files of a sandbox reached by exec only: sent in pieces that fit one call, with checksums; trees as tar."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import secrets
import tarfile
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import BinaryIO, cast

from rollout_worker.sandboxes import archives, scripts, trees
from rollout_worker.sandboxes.errors import SandboxError, SandboxFileError
from rollout_worker.sandboxes.port import Bounds, Transfer
from rollout_worker.sandboxes.reach import Shell


class RemoteFiles:
    """Transfers files. `base` is a directory in the sandbox for files in transit."""

    def __init__(self, shell: Shell, base: str) -> None:
        self._shell = shell
        self._base = base

    async def read(self, path: str, max_bytes: int) -> bytes:
        taken = io.BytesIO()
        await self._read(path, max_bytes, taken)
        return taken.getvalue()

    async def _read(self, path: str, max_bytes: int, target: BinaryIO) -> int:
        """Read a file into `target` and return its mode."""
        async with self._spool() as spool:
            out = await self._check(path, scripts.read(path, spool, max_bytes, self._shell.reach.bytes_out))
            head, _, data = out.partition(b"\n")
            size, mode, digest = head.decode().split()
            if digest == "-" and int(size) <= self._shell.reach.bytes_out:
                target.write(data)
            else:
                await self._take(spool, int(size), digest, target)
            return int(mode, 8) & 0o777

    async def write(self, path: str, data: bytes, mode: int) -> None:
        async with self._spool() as spool:
            inline = len(data) <= self._shell.reach.bytes_in
            if not inline:
                await self.put(spool, io.BytesIO(data))
            await self._check(path, scripts.place_file(spool, path, mode, inline=inline), data if inline else b"")

    async def upload(self, source: Path, target: str) -> Transfer:
        async def place(file: BinaryIO, size: int, mode: int) -> None:
            async with self._spool() as spool:
                await self.put(spool, file)
                await self._check(target, scripts.place_file(spool, target, mode, inline=False))

        async def unpack(packed: BinaryIO) -> None:
            async with self._spool() as spool:
                await self.put(spool, packed)
                await self._check(target, scripts.unpack(spool, target))

        return await archives.upload(source, place, unpack)

    async def download(self, source: str, target: Path, bounds: Bounds) -> Transfer:
        selection, max_bytes = bounds.selection, bounds.max_bytes
        ignore = [] if selection is None else [pattern for pattern in selection.ignore if "/" not in pattern]
        largest = None if selection is None else selection.file_bytes
        with tempfile.TemporaryFile() as file:
            archive = cast(BinaryIO, file)
            async with self._spool() as spool:
                out = await self._check(source, scripts.pack(source, spool, max_bytes, ignore, largest))
                if out == b"file":
                    mode = await self._read(source, max_bytes, archive)
                    return await asyncio.to_thread(_place, archive, target, mode)
                head, _, said = out.partition(b"\n")
                size, digest = head.decode().split()
                await self._take(spool, int(size), digest, archive)
            return await asyncio.to_thread(_unpack, archive, target, bounds, said.decode(errors="replace"))

    async def put(self, path: str, source: BinaryIO) -> int:
        """Send a file and return its size."""
        digest = hashlib.sha256()
        number = size = 0
        while (data := source.read(self._shell.reach.bytes_in)) or number == 0:
            digest.update(data)
            await self._shell.check(scripts.put(path, number, len(data)), data)
            number += 1
            size += len(data)
        await self._shell.check(scripts.join(path, number, digest.hexdigest()))
        return size

    async def _take(self, spool: str, size: int, digest: str, target: BinaryIO) -> None:
        with tempfile.TemporaryDirectory() as directory:
            fetched = Path(directory) / "file"
            if await self._shell.reach.fetch(spool, fetched):
                await asyncio.to_thread(_copy, fetched, size, digest, target)
                return
        found = hashlib.sha256()
        offset = 0
        while offset < size:
            data = await self._shell.check(scripts.get(spool, offset, min(self._shell.reach.bytes_out, size - offset)))
            if not data:
                raise SandboxFileError("a file on its way was removed in the sandbox", reason="EIO")
            found.update(data)
            target.write(data)
            offset += len(data)
        if digest != "-" and found.hexdigest() != digest:
            raise SandboxFileError("a file arrived changed", reason="EIO")

    async def _check(self, path: str, script: str, data: bytes = b"") -> bytes:
        try:
            return await self._shell.check(script, data)
        except SandboxFileError as error:
            reason = str(error.context["reason"])
            if reason == "ENOTAR":
                raise SandboxError(
                    f"{self._shell.name} has no `tar`, which directories need: add it to the image"
                ) from None
            told = f"{path} in {self._shell.name}: {reason}"
            raise SandboxFileError(told, reason=reason, path=path) from error

    @contextlib.asynccontextmanager
    async def _spool(self) -> AsyncGenerator[str]:
        spool = f"{self._base}/t-{secrets.token_hex(6)}"
        yield spool
        # After an error, the rest is removed with the sandbox.
        await self._shell.run(f'rm -rf "{spool}" "{spool}".*')


def _copy(source: Path, size: int, digest: str, target: BinaryIO) -> None:
    found = hashlib.sha256()
    with source.open("rb") as file:
        while data := file.read(1 << 20):
            found.update(data)
            target.write(data)
    if source.stat().st_size != size or (digest != "-" and found.hexdigest() != digest):
        raise SandboxFileError("a file arrived changed", reason="EIO")


def _place(data: BinaryIO, target: Path, mode: int) -> Transfer:
    """Write a single file through `trees`, which follows no link."""
    size = data.tell()
    data.seek(0)
    with tempfile.TemporaryFile() as archive:
        with tarfile.open(fileobj=archive, mode="w") as tar:
            member = tarfile.TarInfo(".")
            member.size, member.mode = size, mode
            tar.addfile(member, data)
        archive.seek(0)
        moved = trees.unpack(cast(BinaryIO, archive), str(target), leave=False)
    return Transfer.of(moved)


def _unpack(archive: BinaryIO, target: Path, bounds: Bounds, said: str) -> Transfer:
    archive.seek(0)
    left, chooser = _left_out(said), trees.Chooser(bounds.selection)
    try:
        return archives.unpack(archive, target, bounds, _plain_name, chooser, left)
    except tarfile.ReadError:  # truncated, because it grew beyond any bound
        raise trees.TooLargeError from None


def _plain_name(name: str) -> str:
    return name.removeprefix("./") or "."


def _left_out(said: str) -> trees.Moved:
    """Return what the script left out and what tar reported."""
    left = trees.Moved()
    named = 0
    for line in said.splitlines():
        word, _, rest = line.partition(" ")
        if word == "=count" and rest.isdigit():
            left.left_out += max(0, int(rest) - named)
        elif word.startswith("=") and rest:
            left.skip(rest.removeprefix("./"), word[1:])
            named += 1
        elif line and "socket ignored" not in line:
            left.skip(".", line)
    return left
