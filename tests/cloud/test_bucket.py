"""What every bucket does: one suite over the providers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from gcs_emulator import Gcs
from moto_locked import AwsEmulator
from rollout.cloud.bucket import ABSENT, Blob, Bucket
from rollout.cloud.open_bucket import open_bucket
from rollout.model.errors import ConfigError, ConflictError, InputError, NotFoundError
from rollout.workloads.remote_files import md5_of

MIB = 1 << 20
PART = 5 * MIB


@dataclass
class Rig:
    bucket: Bucket
    missing: Bucket
    unfinished: Callable[[], list[str]]


@pytest.fixture(params=["s3", "gcs"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    rig = _s3(request.getfixturevalue("aws")) if request.param == "s3" else _gcs(request.getfixturevalue("gcs"))
    await rig.bucket.open()
    yield rig
    await rig.bucket.close()
    await rig.missing.close()
    assert rig.unfinished() == []


def _s3(aws: AwsEmulator) -> Rig:
    name = aws.bucket()
    cloud = aws.cloud(s3={"bucket": name, "multipart_chunk_bytes": PART})
    return Rig(open_bucket(cloud, "s3", name), open_bucket(cloud, "s3", "no-such-bucket"), lambda: aws.unfinished(name))


def _gcs(gcs: Gcs) -> Rig:
    cloud = gcs.cloud(resumable_chunk_bytes=PART)
    return Rig(open_bucket(cloud, "gs", gcs.bucket), open_bucket(cloud, "gs", "no-such-bucket"), gcs.unfinished)


async def pieces(data: bytes, step: int = 300_000) -> AsyncIterator[bytes]:
    for at in range(0, len(data), step):
        yield data[at : at + step]


async def joined(source: AsyncGenerator[bytes]) -> bytes:
    async with aclosing(source):
        found = [piece async for piece in source]
    assert all(len(piece) <= 512 * 1024 for piece in found)
    return b"".join(found)


def same(found: Blob | None, blob: Blob) -> bool:
    """S3 tells no date of what was written but that of its answer, which may be a second later."""
    if found is None or abs(found.modified_ms - blob.modified_ms) > 30_000:
        return False
    return found == replace(blob, modified_ms=found.modified_ms)


@pytest.mark.parametrize("size", [0, 1, PART, 2 * PART, 2 * PART + 1])
async def test_written_and_read(rig: Rig, size: int) -> None:
    data, key = os.urandom(size), "a/ü b%2F//..?#"
    blob = await rig.bucket.write(key, pieces(data), size)
    assert same(await rig.bucket.head(key), blob) and (blob.key, blob.size) == (key, size)
    assert await joined(rig.bucket.read(key)) == data
    assert await joined(rig.bucket.read(key, 1, 10)) == data[1:11]
    assert await joined(rig.bucket.read(key, size // 2)) == data[size // 2 :]
    assert await joined(rig.bucket.read(key, size + 3)) == b""


@pytest.mark.parametrize("size", [0, 1, 2 * PART + 1])
async def test_the_digest_over_plain_http_is_that_of_the_body(rig: Rig, size: int, tmp_path: Path) -> None:
    data, path = os.urandom(size), tmp_path / "x"
    path.write_bytes(data)
    told = await rig.bucket.digest(await rig.bucket.write("k", pieces(data), size))
    if told is not None:  # over TLS it is not asked for
        assert told.md5 == md5_of(path, told.part_bytes)


@pytest.mark.parametrize("size", [10, PART + 1])
async def test_conditions(rig: Rig, size: int) -> None:
    one, two = os.urandom(size), os.urandom(size)
    first = await rig.bucket.write("k", pieces(one), size, when=ABSENT)
    with pytest.raises(ConflictError):
        await rig.bucket.write("k", pieces(two), size, when=ABSENT)
    assert await joined(rig.bucket.read("k", version=first.version)) == one
    second = await rig.bucket.write("k", pieces(two), size)
    assert second.version != first.version
    with pytest.raises(ConflictError):
        await joined(rig.bucket.read("k", version=first.version))
    with pytest.raises(ConflictError):
        await rig.bucket.delete("k", version=first.version)
    assert await rig.bucket.delete("k", version=second.version)
    assert not await rig.bucket.delete("k")


async def test_a_write_on_a_version(rig: Rig) -> None:
    first = await rig.bucket.write("k", pieces(b"one"), 3)
    second = await rig.bucket.write("k", pieces(b"two"), 3, when=first.version)
    with pytest.raises(ConflictError):
        await rig.bucket.write("k", pieces(b"six"), 3, when=first.version)
    assert await joined(rig.bucket.read("k", version=second.version)) == b"two"


@pytest.mark.parametrize("step", [-1, 1])
@pytest.mark.parametrize("size", [10, PART, 2 * PART, 2 * PART + 1])
async def test_a_body_of_another_size_leaves_nothing(rig: Rig, size: int, step: int) -> None:
    with pytest.raises(InputError, match="bytes"):
        await rig.bucket.write("k", pieces(bytes(size + step)), size)
    assert await rig.bucket.head("k") is None


async def test_a_cancelled_write_leaves_nothing(rig: Rig) -> None:
    reached = asyncio.Event()

    async def stuck() -> AsyncIterator[bytes]:
        yield bytes(2 * PART + 10)
        reached.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(rig.bucket.write("k", stuck(), 4 * PART))
    await reached.wait()
    task.cancel()
    asyncio.get_running_loop().call_soon(task.cancel)  # while what is left is removed
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await rig.bucket.head("k") is None


async def test_a_body_that_fails_leaves_nothing(rig: Rig) -> None:
    async def failing() -> AsyncIterator[bytes]:
        yield bytes(PART + 10)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await rig.bucket.write("k", failing(), 4 * PART)
    assert await rig.bucket.head("k") is None


async def test_listed_in_order(rig: Rig) -> None:
    names = sorted([f"p/{n % 3}/{n}" for n in range(9)] + ["p/0", "p/z"], key=str.encode)
    for name in [*names, "q"]:
        await rig.bucket.write(name, pieces(b"x"), 1)
    assert [(one.key, one.size) async for one in rig.bucket.list("p/")] == [(name, 1) for name in names]
    assert [one.key async for one in rig.bucket.list("p/", after=names[5])] == names[6:]
    tops = [("p/0", 1), ("p/0/", -1), ("p/1/", -1), ("p/2/", -1), ("p/z", 1)]
    assert [(one.key, one.size) async for one in rig.bucket.list("p/", delimiter="/")] == tops
    after = rig.bucket.list("p/", after="p/1/", delimiter="/")
    assert [(one.key, one.size) async for one in after] == tops[3:]


async def test_copied(rig: Rig) -> None:
    source = await rig.bucket.write("a", pieces(b"data"), 4)
    copied = await rig.bucket.copy(source, "b")
    assert same(await rig.bucket.head("b"), copied) and copied.size == 4
    with pytest.raises(ConflictError):
        await rig.bucket.copy(source, "b", when=ABSENT)
    await rig.bucket.copy(source, "c", when=ABSENT)
    assert await joined(rig.bucket.read("c")) == b"data"
    await rig.bucket.write("a", pieces(b"else"), 4)
    if not rig.bucket.url.startswith("s3:"):  # moto does not look at CopySourceIfMatch
        with pytest.raises(ConflictError):
            await rig.bucket.copy(source, "d")


async def test_what_is_not_there(rig: Rig) -> None:
    assert await rig.bucket.head("none") is None
    with pytest.raises(NotFoundError, match="none"):
        await joined(rig.bucket.read("none"))
    for call in (rig.missing.open(), rig.missing.write("k", pieces(b"x"), 1)):
        with pytest.raises(ConfigError, match="no-such-bucket"):
            await call
