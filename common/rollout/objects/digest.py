"""Content ids: blake3 over the bytes, whatever store holds them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from rollout.model.errors import InputError, ObjectCorruptError

ID_BYTES = 32
CHUNK = 512 * 1024
"""Largest piece of an object, in bytes, on the wire and in memory."""


def object_id(data: bytes) -> bytes:
    """Return the 32-byte content id of `data`."""
    return blake3(data).digest()


def hash_pieces(pieces: Sequence[bytes]) -> bytes:
    """Return the content id of all bytes in order."""
    hasher = blake3()
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()


async def chunks_of(pieces: Sequence[bytes]) -> AsyncGenerator[bytes]:
    """Yield the bytes of all pieces in order, at most CHUNK at a time."""
    gathered: list[bytes] = []
    size = 0
    for piece in pieces:
        for at in range(0, len(piece), CHUNK):
            part = piece[at : at + CHUNK]
            if size + len(part) > CHUNK:
                yield b"".join(gathered)
                gathered, size = [], 0
            gathered.append(part)
            size += len(part)
    if gathered:
        yield b"".join(gathered)


class Upload:
    """Compares an upload with what it promised: `size` bytes of `object_id`."""

    def __init__(self, object_id: bytes, size: int) -> None:
        self._object_id = object_id
        self._size = size
        self._seen = 0
        self._hasher = blake3()

    def add(self, piece: bytes) -> None:
        """Add a piece. Raises ObjectCorruptError if there are more bytes than promised."""
        self._seen += len(piece)
        if self._seen > self._size:
            raise ObjectCorruptError(f"the upload said {self._size} bytes and sent more than {self._size}")
        self._hasher.update(piece)

    def check(self) -> None:
        """Check the finished upload. Raises ObjectCorruptError."""
        if self._seen != self._size:
            raise ObjectCorruptError(f"the upload said {self._size} bytes and sent {self._seen}")
        if self._hasher.digest() != self._object_id:
            hashed = self._hasher.hexdigest()[:12]
            raise ObjectCorruptError(f"the uploaded bytes hash to {hashed}, not to {self._object_id.hex()[:12]}")


async def spool(file: Any, object_id: bytes, chunks: AsyncIterator[bytes], size: int) -> None:
    """Write `chunks` to `file` in a thread. Raises ObjectCorruptError if they are not what was promised."""
    upload = Upload(object_id, size)

    def write(piece: bytes) -> None:
        upload.add(piece)
        file.write(piece)

    async for piece in chunks:
        await asyncio.to_thread(write, piece)
    upload.check()


def hash_file(path: Path) -> tuple[bytes, int]:
    """Return (content id, size in bytes) of a file. Blocking. Raises OSError if it cannot be read."""
    hasher = blake3()
    size = 0
    with path.open("rb") as file:
        while piece := file.read(4 * CHUNK):
            hasher.update(piece)
            size += len(piece)
    return hasher.digest(), size


def check_id(value: bytes) -> bytes:
    """Return `value` if it can be a content id. Raises InputError otherwise."""
    if len(value) != ID_BYTES:
        raise InputError(f"an object id has {ID_BYTES} bytes, this one has {len(value)}")
    return value
