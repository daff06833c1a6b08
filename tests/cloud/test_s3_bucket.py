"""What is S3's own: lists in its pages, leftovers of uploads, copies in parts."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest
from moto_locked import AwsEmulator
from rollout.cloud import s3_bucket
from rollout.cloud.aws import Aws
from rollout.cloud.bucket import ABSENT
from rollout.cloud.s3_bucket import S3Bucket

MIB = 1 << 20


async def pieces(data: bytes, step: int = 300_000) -> AsyncIterator[bytes]:
    for at in range(0, len(data), step):
        yield data[at : at + step]


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


async def test_sweep_ends_old_uploads(bucket: S3Bucket, aws: AwsEmulator) -> None:
    for key in ("x/1", "x/2", "y/1"):
        aws.s3.create_multipart_upload(Bucket=name_of(bucket), Key=key)
    assert await bucket.sweep("x/", 3600) == 0
    assert await bucket.sweep("x/", 0, exact=True) == 0
    assert await bucket.sweep("x/1", 0, exact=True) == 1
    assert await bucket.sweep("x/", 0) == 1
    assert aws.unfinished(name_of(bucket)) == ["y/1"]


async def test_a_large_object_is_copied_in_parts(
    bucket: S3Bucket, aws: AwsEmulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_bucket, "COPY_PART", 5 * MIB)
    data = os.urandom(11 * MIB)
    source = await bucket.write("a", pieces(data), len(data))
    await bucket.copy(source, "b", when=ABSENT)
    assert aws.body(name_of(bucket), "b") == data and aws.unfinished(name_of(bucket)) == []
