"""Files of a sandbox that is reached by exec only: in pieces that one call can carry, checked, and trees as tar."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import io
import secrets
import stat
import tarfile
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import BinaryIO, cast

from rollout_worker.sandboxes import scripts, trees
from rollout_worker.sandboxes.errors import SandboxError, SandboxFileError
from rollout_worker.sandboxes.port import Bounds, Transfer
from rollout_worker.sandboxes.reach import Shell


class Files:
    """`base`: a directory in the sandbox for what is on its way."""

    def __init__(self, shell: Shell, base: str) -> None:
        self._shell = shell
        self._base = base

    async def read(self, path: str, max_bytes: int) -> bytes:
        taken = io.BytesIO()
        await self._read(path, max_bytes, taken)
        return taken.getvalue()

    async def _read(self, path: str, max_bytes: int, target: BinaryIO) -> int:
        """The file's mode."""
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
        status = await asyncio.to_thread(source.stat)
        if not stat.S_ISDIR(status.st_mode):
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file or a directory", str(source))
            with source.open("rb") as file:
                async with self._spool() as spool:
                    size = await self.put(spool, file)
                    await self._check(target, scripts.place_file(spool, target, status.st_mode & 0o777, inline=False))
            return Transfer(1, size)
        with tempfile.TemporaryFile() as archive:
            packed = cast(BinaryIO, archive)
            moved = await asyncio.to_thread(trees.pack, str(source), packed, None, tarfile.GNU_FORMAT)
            archive.seek(0)
            async with self._spool() as spool:
                await self.put(spool, packed)
                await self._check(target, scripts.unpack(spool, target))
        return Transfer.of(moved)

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
        """Send a file; its size."""
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
        # What is left after a fault goes with the sandbox.
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
    """A single file, by the way that trees take: it follows no link."""
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
    left = trees.Moved()
    with tempfile.TemporaryFile() as file:
        plain = cast(BinaryIO, file)
        try:
            _plain(archive, plain, trees.Chooser(bounds.selection), left)
        except tarfile.ReadError:  # cut off, since it grew beyond any bound
            raise trees.TooLargeError from None
        plain.seek(0)
        most, entries = bounds.max_bytes, bounds.max_entries
        moved = trees.unpack(plain, str(target), leave=False, max_bytes=most, max_entries=entries)
    _note(said, left)
    return Transfer.of(moved, left)


def _note(said: str, left: trees.Moved) -> None:
    """What the script left out, and what tar complained of."""
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


def _plain(archive: BinaryIO, target: BinaryIO, chooser: trees.Chooser, left: trees.Moved) -> None:
    """The archive of any tar as `trees` has it: names without ./, and hard links as the files that they are."""
    with (
        tarfile.open(fileobj=archive, mode="r:", errors="surrogateescape") as tar,
        tarfile.open(fileobj=target, mode="w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as out,
    ):
        for member in tar:
            content = tar.extractfile(member) if member.isreg() or member.islnk() else None
            if member.islnk() and content is not None:
                member.size = tar.getmember(member.linkname).size
                member.type = tarfile.REGTYPE
            member.name = member.name.removeprefix("./") or "."
            if member.name != "." and not chooser.takes(member.name, member.size, left, is_directory=member.isdir()):
                continue
            member.pax_headers = {}
            out.addfile(member, content)
