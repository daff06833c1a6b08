"""A directory as one file whose bytes depend on nothing but names and contents, so that its hash names a state.

GNU tar without compression (the streams of gzip and zstd differ between their versions): entries in the order of their
names, modes 0644 and 0755, and no times, owners or links.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from blake3 import blake3

from rollout.model.errors import InputError, ObjectCorruptError

_PIECE = 1 << 20


class Hashed:
    """What is written to `file` goes through a hash. `digest()`: 32 bytes; `size`: bytes so far."""

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


def pack(directory: Path, target: Path) -> tuple[bytes, int]:
    """Write `directory` to the file `target`; (blake3 of its bytes, size in bytes). Blocking.

    InputError: something in it is neither a file nor a directory. OSError.
    """
    with target.open("wb") as raw:
        hashed = Hashed(raw)
        with tarfile.open(fileobj=hashed, mode="w|", format=tarfile.GNU_FORMAT, bufsize=_PIECE) as archive:
            for name, path in sorted(_entries(directory, "")):
                info = tarfile.TarInfo(name)
                if path.is_dir():
                    info.type, info.mode = tarfile.DIRTYPE, 0o755
                    archive.addfile(info)
                else:
                    info.mode, info.size = 0o644, path.stat().st_size
                    with path.open("rb") as file:
                        archive.addfile(info, file)
        return hashed.digest(), hashed.size


def _entries(directory: Path, prefix: str) -> Iterator[tuple[str, Path]]:
    for path in directory.iterdir():
        name = prefix + path.name
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise InputError(f"{path} is neither a file nor a directory: a snapshot cannot hold it")
        yield name, path
        if path.is_dir():
            yield from _entries(path, f"{name}/")


def unpack(source: Path, directory: Path, expected: bytes | None = None) -> None:
    """The files of `source` into the new directory `directory`. Blocking.

    ObjectCorruptError: the bytes do not hash to `expected`, or it is no archive that `pack` writes; then nothing is
    left of `directory`. OSError.
    """
    if expected is not None and (found := _hash(source)) != expected:
        raise ObjectCorruptError(f"{source} hashes to {found.hex()} and not to {expected.hex()}: it is damaged")
    directory.mkdir(parents=True)
    try:
        with tarfile.open(source, mode="r:") as archive:
            for info in archive:
                if not (info.isfile() or info.isdir()) or not _stays_inside(info.name):
                    raise ObjectCorruptError(f"{source} holds {info.name!r}, which no snapshot does")
                archive.extract(info, directory, set_attrs=False, filter="data")
    except tarfile.TarError as error:
        raise ObjectCorruptError(f"{source} is no snapshot: {error}") from error


def _stays_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts


def _hash(path: Path) -> bytes:
    hasher = blake3()
    hasher.update_mmap(path)
    return hasher.digest()
