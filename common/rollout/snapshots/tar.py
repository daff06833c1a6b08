"""Packs a directory into one file whose bytes depend only on names and contents, so that its hash identifies a state.

It is a GNU tar without compression (the output of gzip and zstd differs between versions): entries ordered by name,
modes 0644 and 0755, and no times, owners or links. Reading and writing take constant memory.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, cast

from blake3 import blake3

from rollout.model.errors import InputError, ObjectCorruptError
from rollout.objects.digest import hash_file

_PIECE = 1 << 20
_FILE_MODE, _DIRECTORY_MODE = 0o644, 0o755


class Hashed:
    """Hashes what is written to `file`. `digest()` is 32 bytes; `size` is the number of bytes so far."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hasher = blake3()
        self.size = 0

    def write(self, data: bytes) -> int:
        self._hasher.update(data)
        self.size += len(data)
        return self._file.write(data)

    def digest(self) -> bytes:
        return self._hasher.digest()


@dataclass(frozen=True, slots=True)
class Packed:
    """`id` is blake3 of the archive, 32 bytes. `size` is in bytes. `members` are blake3 of each file, hex, by name."""

    id: bytes
    size: int
    members: dict[str, str]


def pack(directory: Path, target: Path) -> Packed:
    """Write `directory` to the file `target`, atomically. Blocking.

    Raises InputError if it contains anything except files and directories, or OSError.
    """
    partial = target.with_name(f"{target.name}.partial")
    members: dict[str, str] = {}
    try:
        with partial.open("wb") as raw:
            hashed = Hashed(raw)
            stream = cast(IO[bytes], hashed)  # which it writes to, and nothing else
            with tarfile.open(fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT, bufsize=_PIECE) as archive:
                for name, path in sorted(_entries(directory, "")):
                    info = tarfile.TarInfo(name)
                    if path.is_dir():
                        info.type, info.mode = tarfile.DIRTYPE, _DIRECTORY_MODE
                        archive.addfile(info)
                    else:
                        info.mode, info.size = _FILE_MODE, path.stat().st_size
                        with path.open("rb") as file:
                            reading = _Reading(file)
                            archive.addfile(info, cast(IO[bytes], reading))
                        members[name] = reading.hasher.hexdigest()
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return Packed(hashed.digest(), hashed.size, members)


class _Reading:
    """Hashes what is read from `file`."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.hasher = blake3()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.hasher.update(data)
        return data


def _entries(directory: Path, prefix: str) -> Iterator[tuple[str, Path]]:
    for path in directory.iterdir():
        name = prefix + path.name
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise InputError(f"{path} is neither a file nor a directory: a snapshot cannot hold it")
        yield name, path
        if path.is_dir():
            yield from _entries(path, f"{name}/")


def unpack(source: Path, directory: Path, expected: bytes) -> None:
    """Unpack `source` to the new directory `directory`, atomically. Blocking.

    Raises ObjectCorruptError if the bytes do not hash to `expected`, or it is not an archive that `pack` writes, or
    OSError.
    """
    found, size = hash_file(source)
    if found != expected:
        raise ObjectCorruptError(f"{source} hashes to {found.hex()} and not to {expected.hex()}: it is damaged")
    partial = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir(parents=True)
    try:
        try:
            end = _extract(source, partial)
        except tarfile.TarError as error:
            raise ObjectCorruptError(f"{source} is no snapshot: {error}") from error
        if size != -(-(end + 2 * tarfile.BLOCKSIZE) // tarfile.RECORDSIZE) * tarfile.RECORDSIZE:
            raise ObjectCorruptError(f"{source} is no snapshot: something follows its last file")
        partial.rename(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _extract(source: Path, directory: Path) -> int:
    """Return the position after the last entry."""
    before, end = "", 0
    with tarfile.open(source, mode="r:") as archive:
        for info in archive:
            if not _is_canonical(info) or info.name <= before:
                raise ObjectCorruptError(f"{source} holds {info.name!r} as no snapshot does")
            before = info.name
            archive.extract(info, directory, set_attrs=False, filter="data")
            end = info.offset_data + -(-info.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    return end


def _is_canonical(info: tarfile.TarInfo) -> bool:
    """Return whether an entry is as `pack` writes it, and inside the directory."""
    path = PurePosixPath(info.name)
    inside = bool(info.name) and not path.is_absolute() and ".." not in path.parts and str(path) == info.name
    plain = not (info.mtime or info.uid or info.gid or info.uname or info.gname or info.linkname or info.pax_headers)
    mode = _FILE_MODE if info.type == tarfile.REGTYPE else _DIRECTORY_MODE
    return inside and plain and info.type in (tarfile.REGTYPE, tarfile.DIRTYPE) and info.mode == mode
