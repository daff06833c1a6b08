"""Files of a container, by the engine's archives, even if the container does not run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import tarfile
import tempfile
from collections.abc import AsyncIterator, Generator
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO, cast

from rollout_worker.sandboxes import archives, trees
from rollout_worker.sandboxes.archives import renamed
from rollout_worker.sandboxes.engine_api import (
    Engine,
    EngineError,
    EngineUnreachableError,
    PathStatus,
    as_sandbox_error,
    of_sandbox,
)
from rollout_worker.sandboxes.errors import SandboxError, SandboxFileError
from rollout_worker.sandboxes.port import Bounds, Transfer
from rollout_worker.sandboxes.threads import in_thread

_LINKS = 40  # as the kernel allows in one path
_CHUNK = 1 << 20


class EngineFiles:
    """Files of one container. Every method raises SandboxFileError or what `as_sandbox_error` returns."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name

    async def read(self, path: str, max_bytes: int) -> bytes:
        if self._engine.globs and set(path) & set("\\*?["):
            return await self._read_by_command(path, max_bytes)
        path, status = await self._real(posixpath.normpath(path))
        if status.kind == "directory":
            raise self._fault(path, "EISDIR")
        if status.kind != "file":
            raise self._fault(path, "EINVAL")
        if status.size > max_bytes:
            raise self._fault(path, "too_large")
        with tempfile.TemporaryFile() as file:
            await self._get(path, cast("BinaryIO", file), max_bytes + (64 << 10))
            return await asyncio.to_thread(_content, cast("BinaryIO", file), max_bytes)

    async def _read_by_command(self, path: str, max_bytes: int) -> bytes:
        script = 'test -f "$1" && exec head -c "$2" -- "$1"'
        with of_sandbox(self._name):
            code, data = await self._engine.run(self._name, script, path, str(max_bytes + 1))
        if code != 0:
            raise self._fault(path, "ENOENT")
        if len(data) > max_bytes:
            raise self._fault(path, "too_large")
        return data

    async def write(self, path: str, data: bytes, mode: int) -> None:
        with tempfile.TemporaryFile() as file:
            file.write(data)
            await self._place(cast("BinaryIO", file), len(data), path, mode)

    async def _place(self, content: BinaryIO, size: int, path: str, mode: int) -> None:
        parent, name = posixpath.split(posixpath.normpath(path))
        base, missing = await self._base(parent)
        if not missing:
            found = await self._status(posixpath.join(base, name))
            if found is not None and found.kind == "directory":
                raise self._fault(path, "EISDIR")
        with tempfile.TemporaryFile() as archive:
            with tarfile.open(fileobj=archive, mode="w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as tar:
                _add_directories(tar, base, missing)
                header = tarfile.TarInfo(_within(base, *missing, name))
                header.size, header.mode = size, mode
                content.seek(0)
                tar.addfile(header, content)
            await self._put(cast("BinaryIO", archive), path)

    async def upload(self, source: Path, target: str) -> Transfer:
        async def place(file: BinaryIO, size: int, mode: int) -> None:
            await self._place(file, size, target, mode)

        async def unpack(packed: BinaryIO) -> None:
            base, missing = await self._base(posixpath.normpath(target))
            with tempfile.TemporaryFile() as file:
                archive = cast("BinaryIO", file)
                names = await asyncio.to_thread(_below, packed, archive, base, missing)
                if not missing:
                    await self._check_in_the_way(base, names)
                await self._put(archive, target)

        return await archives.upload(source, place, unpack)

    async def _check_in_the_way(self, base: str, names: dict[str, bool]) -> None:
        """Refuse to write through a link or over another kind of file. `names` says which are directories."""
        there: set[str] = set()
        for name, is_directory in names.items():
            parent = posixpath.dirname(name)
            if parent and parent not in there:
                continue
            found = await self._status(posixpath.join(base, name))
            if found is None:
                continue
            if is_directory and found.kind != "directory":
                raise self._fault(posixpath.join(base, name), "ELOOP" if found.kind == "link" else "ENOTDIR")
            if not is_directory and found.kind == "directory":
                raise self._fault(posixpath.join(base, name), "EISDIR")
            if found.kind == "directory":
                there.add(name)

    async def download(self, source: str, target: Path, bounds: Bounds) -> Transfer:
        source, selection, max_bytes = posixpath.normpath(source), bounds.selection, bounds.max_bytes
        if selection is not None and (found := await self._status(source)) is not None and found.kind == "link":
            raise self._fault(source, "ELOOP")
        source, status = await self._real(source)
        if status.kind not in ("directory", "file"):
            raise self._fault(source, "EINVAL")
        if status.kind == "file" and status.size > max_bytes:
            raise self._fault(source, "too_large")
        left = trees.Moved()
        with tempfile.TemporaryFile() as file:
            raw = cast("BinaryIO", file)
            try:
                if selection is None or status.kind == "file":
                    # Headers and names may take more than 512 bytes an entry here, but not without limit.
                    await self._get(source, raw, 4 * max_bytes + (1 << 20))
                else:
                    left = await self._get_selected(source, raw, selection)
                return await asyncio.to_thread(archives.unpack, raw, target, bounds, _name_below, None, left)
            except tarfile.TarError as error:
                raise SandboxFileError(
                    f"{source} in {self._name} did not arrive whole: {error}", reason="EIO"
                ) from error

    # Paths

    async def _status(self, path: str) -> PathStatus | None:
        try:
            return await self._engine.status(self._name, path)
        except EngineError as error:
            if error.status == 404 and await self._is_there():
                return None
            if await self._holds('test -L "$1" && ! test -e "$1"', path):  # engines have no error for it
                raise self._fault(path, "ELOOP") from error
            raise self._told(path, error) from error
        except EngineUnreachableError as error:
            raise as_sandbox_error(self._name, error) from error

    async def _is_there(self) -> bool:
        with of_sandbox(self._name):
            await self._engine.show(self._name)
        return True

    async def _real(self, path: str) -> tuple[str, PathStatus]:
        """Follow links; return the path they lead to and its status."""
        asked = path
        for _ in range(_LINKS):
            found = await self._status(path)
            if found is None:
                raise self._fault(asked, await self._why_missing(asked, path))
            if found.kind != "link":
                return path, found
            if not found.link:
                raise self._fault(asked, "ELOOP")
            path = posixpath.normpath(posixpath.join(posixpath.dirname(path), found.link))
        raise self._fault(asked, "ELOOP")

    async def _why_missing(self, asked: str, path: str) -> str:
        parent, found = posixpath.dirname(path), None
        while parent != "/" and (found := await self._status(parent)) is None:
            parent = posixpath.dirname(parent)
        if found is not None and found.kind in ("file", "other"):
            return "ENOTDIR"
        # In /dev, /proc or another file system that archives do not show?
        return "EINVAL" if await self._holds('test -e "$1"', asked) else "ENOENT"

    async def _holds(self, script: str, path: str) -> bool:
        try:
            code, _ = await self._engine.run(self._name, script, path)
        except EngineError:  # the container does not run
            return False
        except EngineUnreachableError as error:
            raise as_sandbox_error(self._name, error) from error
        return code == 0

    async def _base(self, directory: str) -> tuple[str, list[str]]:
        """Return (the last existing directory of the path, names of the missing ones below it)."""
        missing: list[str] = []
        path = directory
        while True:
            found = await self._status(path)
            if found is not None and found.kind == "link":
                path, found = await self._real(path)
            if found is not None:
                if found.kind != "directory":
                    raise self._fault(directory, "ENOTDIR")
                return path, missing
            missing.insert(0, posixpath.basename(path))
            path = posixpath.dirname(path)

    # Moving

    async def _get(self, path: str, target: BinaryIO, most: int) -> None:
        size = 0
        with self._telling(path):
            async with self._engine.get_archive(self._name, path) as pieces:
                async for piece in pieces:
                    size += len(piece)
                    if size > most:
                        raise self._fault(path, "too_large")
                    await asyncio.to_thread(target.write, piece)
        target.seek(0)

    async def _get_selected(self, path: str, target: BinaryIO, selection: trees.Selection) -> trees.Moved:
        """Download the selected members; the others are not even written to a temporary file."""
        reader, writer = os.pipe()
        choosing = asyncio.ensure_future(asyncio.to_thread(_choose, reader, target, selection))
        choosing.add_done_callback(lambda done: done.cancelled() or done.exception())  # the engine's error comes first
        try:
            with (
                self._telling(path),
                contextlib.suppress(BrokenPipeError),
                os.fdopen(writer, "wb", buffering=0) as stream,
            ):
                async with self._engine.get_archive(self._name, path) as pieces:
                    async for piece in pieces:
                        await in_thread(_write_all, stream, piece)
        finally:
            await asyncio.wait([choosing])
        target.seek(0)
        return choosing.result()

    async def _put(self, archive: BinaryIO, path: str) -> None:
        archive.seek(0)
        with self._telling(path):  # at the root: an engine refuses links that lead out of where it unpacks
            await self._engine.put_archive(self._name, "/", _pieces(archive))

    @contextlib.contextmanager
    def _telling(self, path: str) -> Generator[None]:
        try:
            yield
        except EngineError as error:
            raise self._told(path, error) from error
        except EngineUnreachableError as error:
            raise as_sandbox_error(self._name, error) from error

    def _told(self, path: str, error: EngineError) -> SandboxError:
        reason = {400: "EINVAL", 403: "EROFS", 404: "ENOENT"}.get(error.status, "EIO")
        if error.status == 404 and "container" in error.message.lower():
            return as_sandbox_error(self._name, error)
        return SandboxFileError(f"{path} in {self._name}: {error.message}", reason=reason, path=path)

    def _fault(self, path: str, reason: str) -> SandboxFileError:
        return SandboxFileError(f"{path} in {self._name}: {reason}", reason=reason, path=path)


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    while data := await asyncio.to_thread(file.read, _CHUNK):
        yield data


def _within(*parts: str) -> str:
    """Return the name of a member of an archive that is unpacked at the root."""
    return posixpath.join(*parts).lstrip("/")


def _add_directories(tar: tarfile.TarFile, base: str, missing: list[str]) -> None:
    for depth in range(len(missing)):
        tar.addfile(_directory(_within(base, *missing[: depth + 1])))


def _directory(name: str) -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.type, header.mode = tarfile.DIRTYPE, 0o755
    return header


def _content(archive: BinaryIO, max_bytes: int) -> bytes:
    with tarfile.open(fileobj=archive, mode="r:") as tar:
        member = tar.next()
        content = tar.extractfile(member) if member is not None and member.isreg() else None
        return content.read(max_bytes) if content is not None else b""


def _below(packed: BinaryIO, archive: BinaryIO, base: str, missing: list[str]) -> dict[str, bool]:
    """Move an archive of `trees.pack`, without its top, below `base` and directories yet to be made. Return (name, is a
    directory)."""
    names: dict[str, bool] = {}
    with (
        tarfile.open(fileobj=packed, mode="r:", errors="surrogateescape") as tar,
        tarfile.open(fileobj=archive, mode="w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as out,
    ):
        _add_directories(out, base, missing)
        for member in tar:
            if member.name == ".":
                continue
            names[member.name] = member.isdir()
            content = tar.extractfile(member) if member.isreg() else None
            member.name = _within(base, *missing, member.name)
            out.addfile(member, content)
    return names


def _choose(reader: int, target: BinaryIO, selection: trees.Selection) -> trees.Moved:
    """Copy the selected members of an engine's archive, read from the pipe `reader`."""
    moved, chooser, sizes = trees.Moved(), trees.Chooser(selection), dict[str, int]()
    with (
        os.fdopen(reader, "rb") as stream,
        tarfile.open(fileobj=stream, mode="r|", errors="surrogateescape") as tar,
        tarfile.open(fileobj=target, mode="w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as out,
    ):
        for member in tar:
            name = _name_below(member.name)
            size = sizes.get(_name_below(member.linkname), -1) if member.islnk() else member.size
            if size < 0:
                moved.skip(name, f"a hard link to {_name_below(member.linkname)}, which was left out")
                continue
            if name != "." and not chooser.takes(name, size, moved, is_directory=member.isdir()):
                continue
            sizes[name] = size
            out.addfile(renamed(member, member.name), tar.extractfile(member) if member.isreg() else None)
    return moved


def _write_all(stream: RawIOBase, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[stream.write(view) or 0 :]


def _name_below(name: str) -> str:
    """Return the name in the tree for one in an engine's archive, which begins with the top's own."""
    return name.rstrip("/").partition("/")[2] or "."
