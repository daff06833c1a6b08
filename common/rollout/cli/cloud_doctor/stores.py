"""Checks of the bucket: a small object is written and read, and 64 MiB in parts by content id. Both are deleted."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress

from blake3 import blake3

from rollout.cli.cloud_doctor.check import Passed
from rollout.cloud.bucket import ABSENT, Blob, Bucket
from rollout.model.errors import ConflictError, ObjectCorruptError, RolloutError

SMALL = 4096
LARGE = 64 << 20
PIECE = 1 << 20
TIDY_S = 10.0


async def roundtrip(bucket: Bucket, prefix: str) -> Passed:
    """Write, read, compare and delete a small object, and check that conditional writes are honored."""
    data = secrets.token_bytes(SMALL)
    await bucket.open()
    async with _key(bucket, prefix) as key:
        await bucket.write(key, _once(data), len(data), when=ABSENT)
        read = b"".join([piece async for piece in bucket.read(key)])
        if read != data:
            raise ObjectCorruptError(f"{bucket.url}{key}: what was read is not what was written")
        kept = await _keeps_conditions(bucket, key)
    advice = () if kept else (NO_CONDITIONS,)
    return Passed(f"{bucket.url}{prefix}", advice)


NO_CONDITIONS = (
    "the store does not keep to conditional writes (If-None-Match): two coordinators that write one object at the same "
    "time both succeed, which is harmless for objects by content id; a newer version of the store may have them"
)


async def _keeps_conditions(bucket: Bucket, key: str) -> bool:
    if not await bucket.conditional(key):
        return False
    try:
        await bucket.write(key, _once(b"another"), 7, when=ABSENT)
    except ConflictError:
        return True
    return False


async def content_id(bucket: Bucket, prefix: str, size: int = LARGE) -> Passed:
    """Upload random bytes in parts to a temporary key, copy them within the service as objects are, and hash the
    copy."""
    seed = secrets.token_bytes(32)
    async with _key(bucket, prefix) as temporary, _key(bucket, prefix) as key:
        blob = await bucket.write(temporary, _random(seed, size), size)
        copied = await bucket.copy(blob, key)
        expected, found = await asyncio.to_thread(_digest, seed, size), await _read_digest(bucket, copied)
    if expected != found:
        raise ObjectCorruptError(
            f"{bucket.url}{key}: its content id is {found[:16]}..., and {expected[:16]}... was written: what stands "
            "between here and the store changes bytes"
        )
    parts = -(-size // bucket.part_bytes)
    return Passed(f"{size >> 20} MiB in {parts} parts, blake3 {found[:16]}...")


async def _read_digest(bucket: Bucket, blob: Blob) -> str:
    hasher = blake3()
    async for piece in bucket.read(blob.key, version=blob.version):
        hasher.update(piece)
    return hasher.hexdigest()


def _digest(seed: bytes, size: int) -> str:
    hasher = blake3()
    for at in range(0, size, PIECE):
        hasher.update(_piece(seed, at, size))
    return hasher.hexdigest()


def _piece(seed: bytes, at: int, size: int) -> bytes:
    """Return `size` bytes of blake3's endless output, which is as good as random and need not be stored."""
    return blake3(seed).digest(min(PIECE, size - at), seek=at)


async def _random(seed: bytes, size: int) -> AsyncIterator[bytes]:
    for at in range(0, size, PIECE):
        yield await asyncio.to_thread(_piece, seed, at, size)


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


def new_key(prefix: str) -> str:
    return f"{prefix}temp/doctor-{secrets.token_hex(8)}"


@asynccontextmanager
async def _key(bucket: Bucket, prefix: str) -> AsyncGenerator[str]:
    """Yield a fresh key below `temp/`, which is deleted in any case."""
    key = new_key(prefix)
    failed = True
    try:
        yield key
        failed = False
    finally:
        tidying = asyncio.ensure_future(_delete(bucket, key, failed=failed))
        await asyncio.shield(tidying)


async def _delete(bucket: Bucket, key: str, *, failed: bool) -> None:
    """Delete the key. If the check has `failed`, an error of the deletion does not hide the first error."""
    if not failed:
        await bucket.delete(key)
        return
    with suppress(RolloutError, TimeoutError):
        async with asyncio.timeout(TIDY_S):
            await bucket.delete(key)
