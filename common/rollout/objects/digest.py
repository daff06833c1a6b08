"""Content ids: blake3 over the bytes, whatever store holds them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from blake3 import blake3

from rollout.model.errors import InputError

ID_BYTES = 32
CHUNK = 512 * 1024
"""Largest piece of an object handed from one part to another, on the wire and in memory."""


def object_id(data: bytes) -> bytes:
    """The 32-byte content id of `data`."""
    return blake3(data).digest()


def hash_pieces(pieces: Sequence[bytes]) -> bytes:
    """The content id of all bytes in order."""
    hasher = blake3()
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()


async def chunks_of(pieces: Sequence[bytes]) -> AsyncGenerator[bytes]:
    """The bytes of all pieces in order, at most CHUNK at once."""
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


def hash_file(path: Path) -> tuple[bytes, int]:
    """(content id, size in bytes) of a file. Blocking; OSError if it cannot be read."""
    hasher = blake3()
    size = 0
    with path.open("rb") as file:
        while piece := file.read(4 * CHUNK):
            hasher.update(piece)
            size += len(piece)
    return hasher.digest(), size


def check_id(value: bytes) -> bytes:
    """`value` if it can be a content id, else InputError."""
    if len(value) != ID_BYTES:
        raise InputError(f"an object id has {ID_BYTES} bytes, this one has {len(value)}")
    return value
