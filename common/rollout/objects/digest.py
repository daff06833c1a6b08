"""Content ids: blake3 over the bytes, whatever store holds them."""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

from rollout.model.errors import InputError

ID_BYTES = 32
CHUNK = 512 * 1024
"""Largest piece of an object handed from one part to another, on the wire and in memory."""


def object_id(data: bytes) -> bytes:
    """The 32-byte content id of `data`."""
    return blake3(data).digest()


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
