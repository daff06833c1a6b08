"""Transfer of trees as whole archives in temporary files, where none of our programs runs at the other end."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import tarfile
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import BinaryIO, cast

from rollout_worker.sandboxes import trees
from rollout_worker.sandboxes.port import Bounds, Transfer

_MEMBER = tarfile.BLOCKSIZE


async def upload(
    source: Path,
    place: Callable[[BinaryIO, int, int], Awaitable[None]],
    unpack: Callable[[BinaryIO], Awaitable[None]],
) -> Transfer:
    """Upload `source`. `place` writes a file of this size and mode, `unpack` a tree of `trees.pack`. Raises OSError."""
    if not await asyncio.to_thread(source.is_dir):
        with source.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file or a directory", str(source))
            await place(file, status.st_size, stat.S_IMODE(status.st_mode) & 0o777)
            return Transfer(1, status.st_size)
    with tempfile.TemporaryFile() as file:
        archive = cast("BinaryIO", file)
        moved = await asyncio.to_thread(trees.pack, str(source), archive, None, tarfile.GNU_FORMAT)
        archive.seek(0)
        await unpack(archive)
    return Transfer.of(moved)


def unpack(
    archive: BinaryIO,
    target: Path,
    bounds: Bounds,
    name_of: Callable[[str], str],
    chooser: trees.Chooser | None = None,
    left: trees.Moved | None = None,
) -> Transfer:
    """Unpack an archive of any tar program at `target`, hard links as copies of their files. Blocks.

    `name_of` returns a member's name in the tree. `left` has what was left out before; the chooser adds to it. Raises
    TarError or TooLargeError.
    """
    left = left or trees.Moved()
    with tempfile.TemporaryFile() as file:
        plain = cast("BinaryIO", file)
        with (
            tarfile.open(fileobj=archive, mode="r:", errors="surrogateescape") as tar,
            tarfile.open(fileobj=plain, mode="w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as out,
        ):
            size = members = 0
            for member in tar:
                name = name_of(member.name)
                whole = _linked(tar, member) if member.islnk() else member
                is_top, is_directory = name == ".", whole.isdir()
                if not is_top and chooser and not chooser.takes(name, whole.size, left, is_directory=is_directory):
                    continue
                members += 1
                size += whole.size
                if size + members * _MEMBER > bounds.max_bytes + _MEMBER:
                    raise trees.TooLargeError
                out.addfile(renamed(whole, name), tar.extractfile(whole) if whole.isreg() else None)
        plain.seek(0)
        most, entries = bounds.max_bytes, bounds.max_entries
        moved = trees.unpack(plain, str(target), leave=False, max_bytes=most, max_entries=entries)
    return Transfer.of(moved, left)


def _linked(tar: tarfile.TarFile, member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return the file that a hard link refers to."""
    try:
        return tar.getmember(member.linkname)
    except KeyError as error:
        raise tarfile.ReadError(f"{member.name} is a hard link to nothing") from error


def renamed(member: tarfile.TarInfo, name: str) -> tarfile.TarInfo:
    member = member.replace(name=name, deep=True)
    member.pax_headers = {}
    return member
