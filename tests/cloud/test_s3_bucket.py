"""S3Bucket on the emulator."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import pytest
from moto_locked import AwsEmulator
from rollout.cloud import s3_bucket
from rollout.cloud.aws import Aws
from rollout.cloud.bucket import ABSENT
from rollout.cloud.open_bucket import open_bucket
from rollout.cloud.s3_bucket import S3Bucket
from rollout.model.errors import ConfigError, ConflictError, InputError, NotFoundError

MIB = 1 << 20


async def pieces(data: bytes, step: int = 300_000) -> AsyncIterator[bytes]:
    for at in range(0, len(data), step):
        yield data[at : at + step]


async def joined(source: AsyncGenerator[bytes]) -> bytes:
    async with aclosing(source):
        return b"".join([piece async for piece in source])


@pytest.fixture
async def bucket(aws: AwsEmulator) -> AsyncIterator[S3Bucket]:
    name = aws.bucket()
    cloud = aws.cloud(s3={"bucket": name, "multipart_chunk_bytes": 5 * MIB})
    bucket = S3Bucket(Aws(cloud), name, cloud.s3, own_session=True)
    await bucket.open()
    yield bucket
    await bucket.close()


def name_of(bucket: S3Bucket) -> str:
    return bucket.url.split("/")[2]


@pytest.mark.parametrize("size", [0, 1, 5 * MIB + 1, pytest.param(17 * MIB, marks=pytest.mark.slow)])
async def test_written_and_read(bucket: S3Bucket, aws: AwsEmulator, size: int) -> None:
    data = os.urandom(size)
    blob = await bucket.write("a/b", pieces(data), size)
    assert aws.body(name_of(bucket), "a/b") == data
    found = await bucket.head("a/b")
    assert found is not None and (found.size, found.version) == (size, blob.version)
    assert await joined(bucket.read("a/b")) == data
    assert await joined(bucket.read("a/b", 1, 10)) == data[1:11]
    assert await joined(bucket.read("a/b", size + 3)) == b""
    assert aws.unfinished(name_of(bucket)) == []


@pytest.mark.parametrize("size", [10, 6 * MIB])
async def test_conditions(bucket: S3Bucket, size: int) -> None:
    one, two = os.urandom(size), os.urandom(size)
    assert await bucket.conditional("k")
    first = await bucket.write("k", pieces(one), size, when=ABSENT)
    with pytest.raises(ConflictError):
        await bucket.write("k", pieces(two), size, when=ABSENT)
    assert await joined(bucket.read("k")) == one
    if size <= bucket.part_bytes:  # the emulator does not look at If-Match when an upload in parts ends
        second = await bucket.write("k", pieces(two), size, when=first.version)
        with pytest.raises(ConflictError):
            await bucket.write("k", pieces(one), size, when=first.version)
        with pytest.raises(ConflictError):
            await bucket.delete("k", version=first.version)
        assert await bucket.delete("k", version=second.version) is True
        assert await bucket.delete("k") is False


@pytest.mark.parametrize("step", [-1, 1])
@pytest.mark.parametrize("size", [10, 11 * MIB])
async def test_a_body_of_another_size_leaves_nothing(bucket: S3Bucket, aws: AwsEmulator, size: int, step: int) -> None:
    with pytest.raises(InputError, match="was to have"):
        await bucket.write("k", pieces(bytes(size + step)), size)
    assert await bucket.head("k") is None and aws.unfinished(name_of(bucket)) == []


async def test_a_cancelled_upload_is_aborted(bucket: S3Bucket, aws: AwsEmulator) -> None:
    reached = asyncio.Event()

    async def stuck() -> AsyncIterator[bytes]:
        yield bytes(11 * MIB)
        reached.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(bucket.write("k", stuck(), 20 * MIB))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert aws.unfinished(name_of(bucket)) == []


async def test_list_in_pages_and_by_directory(
    bucket: S3Bucket, aws: AwsEmulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_bucket, "PAGE", 4)
    names = sorted(f"p/{n % 3}/{n:04}" for n in range(15))
    for name in names:
        aws.s3.put_object(Bucket=name_of(bucket), Key=name, Body=b"")
    assert [one.key async for one in bucket.list("p/")] == names
    assert [one.key async for one in bucket.list("p/", after=names[7])] == names[8:]
    assert [(one.key, one.size) async for one in bucket.list("p/", delimiter="/")] == [
        (f"p/{n}/", -1) for n in range(3)
    ]


async def test_copy(bucket: S3Bucket) -> None:
    source = await bucket.write("a", pieces(b"data"), 4)
    await bucket.copy(source, "b")
    await bucket.copy(source, "c", when=ABSENT)
    with pytest.raises(ConflictError):
        await bucket.copy(source, "b", when=ABSENT)
    assert await joined(bucket.read("b")) == await joined(bucket.read("c")) == b"data"


async def test_sweep_ends_old_uploads(bucket: S3Bucket, aws: AwsEmulator) -> None:
    for key in ("x/1", "x/2", "y/1"):
        aws.s3.create_multipart_upload(Bucket=name_of(bucket), Key=key)
    assert await bucket.sweep("x/", 3600) == 0
    assert await bucket.sweep("x/", 0, exact=True) == 0
    assert await bucket.sweep("x/1", 0, exact=True) == 1
    assert await bucket.sweep("x/", 0) == 1
    assert aws.unfinished(name_of(bucket)) == ["y/1"]


async def test_what_is_not_there(bucket: S3Bucket, aws: AwsEmulator) -> None:
    assert await bucket.head("none") is None
    with pytest.raises(NotFoundError, match="/none cannot be read"):
        await joined(bucket.read("none"))
    cloud = aws.cloud(s3={"bucket": "no-such-bucket"})
    other = open_bucket(cloud, "s3", "no-such-bucket")
    with pytest.raises(ConfigError, match=r"\[cloud.s3\] bucket"):
        await other.open()
    await other.close()


async def test_a_large_object_is_copied_in_parts(
    bucket: S3Bucket, aws: AwsEmulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_bucket, "COPY_PART", 5 * MIB)
    data = os.urandom(11 * MIB)
    source = await bucket.write("a", pieces(data), len(data))
    await bucket.copy(source, "b", when=ABSENT)
    assert aws.body(name_of(bucket), "b") == data and aws.unfinished(name_of(bucket)) == []
