"""The object store on S3 through a proxy that breaks things: nothing lost, nothing left behind, memory bounded."""

from __future__ import annotations

import asyncio
import io
import os
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path

import pytest
from boto3.s3.transfer import TransferConfig
from fault_proxy import FaultProxy, fault_proxy
from moto_locked import AwsEmulator
from rollout.cloud import retry, s3_upload
from rollout.cloud.aws import Aws
from rollout.cloud.bucket import ABSENT
from rollout.cloud.s3_bucket import S3Bucket
from rollout.config.cloud import S3Section
from rollout.model.errors import (
    ConflictError,
    NotFoundError,
    ObjectCorruptError,
    StorageError,
    StorageUnavailableError,
)
from rollout.objects import bucket_store
from rollout.objects.bucket_store import BucketObjectStore
from rollout.objects.claims import FilePins
from rollout.objects.digest import object_id
from rollout.workloads.remote_files import download

MIB = 1 << 20
PART = 5 * MIB
BIG = os.urandom(16 * MIB)
NAME = object_id(BIG)
PART_PUT, COMPLETE, CREATE = r"^PUT .*partNumber=2", r"^POST .*uploadId=", r"^POST .*\?uploads"
COPY = r"/cas/.*uploadId="


def error(code: str, more: str = "") -> bytes:
    return f"<Error><Code>{code}</Code><Message>told by the test</Message>{more}</Error>".encode()


@dataclass
class Rig:
    proxy: FaultProxy
    bucket: S3Bucket
    store: BucketObjectStore
    aws: AwsEmulator
    name: str

    async def put(self, data: bytes = BIG) -> bool:
        return await self.store.put(object_id(data), pieces(data), len(data))

    async def get(self, data: bytes = BIG) -> bytes:
        async with aclosing(self.store.get(object_id(data))) as found:
            return b"".join([piece async for piece in found])

    def nothing_left(self) -> bool:
        return not self.aws.unfinished(self.name) and not self.aws.keys(self.name, "temp/")


async def pieces(data: bytes, step: int = 512 << 10) -> AsyncIterator[bytes]:
    for at in range(0, len(data), step):
        yield data[at : at + step]


@pytest.fixture
async def rig(aws: AwsEmulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(retry, "FIRST_S", {"transient": 0.01, "throttled": 0.01})
    name = aws.bucket()
    async with fault_proxy(aws.endpoint) as proxy:
        cloud = aws.cloud(
            endpoint_url=proxy.url, s3={"bucket": name, "multipart_chunk_bytes": PART, "conditional_writes": "on"}
        )
        bucket = S3Bucket(Aws(cloud), name, cloud.s3, own_session=True)
        store = BucketObjectStore(bucket, "", FilePins(tmp_path / "pins.db"))
        await store.open()
        yield Rig(proxy, bucket, store, aws, name)
        await store.close()


TROUBLE = {
    "a part cut in the middle": (PART_PUT, {"cut_request": MIB}),
    "a part's answer lost": (PART_PUT, {"lose": True}),
    "SlowDown": (r"partNumber|POST", {"status": 503, "body": error("SlowDown"), "times": 4}),
    "an upload's beginning unheard": (CREATE, {"lose": True}),
    "a completion unheard": (COMPLETE, {"lose": True}),
    "an error in the body of a 200": (COMPLETE, {"status": 200, "body": error("InternalError")}),
    "the copy's completion unheard": (COPY, {"lose": True, "skip": 1}),
    "a conflict with another writer": (COPY, {"status": 409, "body": error("ConditionalRequestConflict"), "skip": 1}),
    "credentials expire": (PART_PUT, {"status": 400, "body": error("ExpiredToken")}),
}


SHOWN_BY_OTHERS = ("a part's answer lost", "SlowDown", "the copy's completion unheard", "an upload's beginning unheard")


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.slow] if what in SHOWN_BY_OTHERS else []) for what in TROUBLE]
)
async def test_a_large_put_gets_through(rig: Rig, what: str) -> None:
    pattern, fault = TROUBLE[what]
    met = rig.proxy.add(pattern, **fault)
    assert await rig.put() is True
    assert met.times == 0, "the fault was met"
    assert rig.nothing_left()
    assert await rig.get() == BIG


async def test_a_part_that_arrived_is_not_sent_again(rig: Rig) -> None:
    rig.proxy.add(PART_PUT, lose=True, times=2)  # aiohttp sends it a second time, as the connection was a kept one
    await rig.put()
    assert len(rig.proxy.lines(r"^PUT .*temp/.*partNumber=2")) <= 2


async def test_what_cannot_be_done_leaves_nothing(rig: Rig) -> None:
    refused = rig.proxy.add(PART_PUT, status=403, body=error("AccessDenied"), times=100)
    with pytest.raises(StorageUnavailableError, match="s3:PutObject"):  # it waits for whoever gives the permission
        await rig.put()
    refused.times = 0
    assert rig.nothing_left() and await rig.store.head(NAME) is None


async def test_an_upload_that_ended_over_a_damaged_object_is_not_taken_for_stored(rig: Rig) -> None:
    rig.aws.s3.put_object(Bucket=rig.name, Key="k", Body=bytes(16 * MIB))
    rig.proxy.add(COMPLETE, status=404, body=error("NoSuchUpload"))
    with pytest.raises(StorageUnavailableError, match="what is there is not of it"):
        await rig.bucket.write("k", pieces(BIG), len(BIG))
    assert rig.aws.unfinished(rig.name) == []


async def test_a_small_put_without_an_answer_is_no_conflict_with_itself(rig: Rig) -> None:
    rig.proxy.add(r"^PUT /[^/]+/k", lose=True)
    blob = await rig.bucket.write("k", pieces(b"mine"), 4, when=ABSENT)
    found = await rig.bucket.head("k")
    assert found is not None and found.version == blob.version
    with pytest.raises(ConflictError):
        await rig.bucket.write("k", pieces(b"mine"), 4, when=ABSENT)


async def test_a_body_that_breaks_goes_on_where_it_broke(rig: Rig) -> None:
    await rig.put()
    rig.proxy.add(r"^GET .*/cas/", cut_answer=3 * MIB, times=2)
    rig.proxy.asked.clear()
    assert await rig.get() == BIG
    resumed = [headers for line, headers in rig.proxy.asked if line.startswith("GET") and "if-match" in headers]
    assert len(resumed) == 2 and all(headers["range"] != "bytes=0-8388607" for headers in resumed)


async def test_an_object_that_becomes_another_while_it_is_read_is_told(rig: Rig) -> None:
    rig.aws.s3.put_object(Bucket=rig.name, Key="k", Body=bytes(4 * MIB))
    rig.proxy.add(r"^GET .*/k", cut_answer=MIB)
    found = rig.bucket.read("k")
    async with aclosing(found):
        await anext(found)
        rig.aws.s3.put_object(Bucket=rig.name, Key="k", Body=b"1" * (4 * MIB))
        with pytest.raises(ConflictError):
            async for _ in found:
                pass


async def test_a_store_that_ignores_ranges(rig: Rig) -> None:
    await rig.put()
    rig.proxy.add(r"^GET", without=("range",), times=100)
    assert await rig.get() == BIG
    assert await rig.store.parts(NAME, [(7 * MIB, 10)]) == [BIG[7 * MIB : 7 * MIB + 10]]


async def test_a_slow_link_is_not_cut_off(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_upload, "STALL_S", 0.5)
    data = os.urandom(2 * MIB)
    rig.proxy.add(r"^PUT .*/cas/", bytes_per_s=1.5 * MIB)
    assert await rig.put(data) is True
    assert len(rig.proxy.lines(r"^PUT .*/cas/")) == 1


async def test_a_peer_that_takes_no_more_is_left(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_upload, "STALL_S", 0.5)
    section = S3Section(bucket=rig.name, multipart_chunk_bytes=64 * MIB)  # more than the kernel's buffers hold
    bucket = S3Bucket(rig.bucket._aws, rig.name, section)  # pyright: ignore[reportPrivateUsage]
    rig.proxy.add(r"^PUT", stall=MIB)
    await bucket.write("k", pieces(BIG * 2), 2 * len(BIG))
    assert rig.aws.body(rig.name, "k") == BIG * 2


async def test_a_clock_that_is_wrong_is_told(rig: Rig) -> None:
    date = {"date": formatdate(1_000_000_000, usegmt=True)}
    rig.proxy.add(r"^PUT", status=403, body=error("RequestTimeTooSkewed"), headers=date)
    with pytest.raises(StorageUnavailableError, match=r"clock is wrong by \d+ s \(ahead\).*NTP"):
        await rig.put(b"small")


async def test_another_region_is_told(rig: Rig) -> None:
    answer = error("AuthorizationHeaderMalformed", "<Region>us-west-2</Region>")
    rig.proxy.add(r"^PUT", status=400, body=answer, times=3)
    with pytest.raises(StorageUnavailableError, match=r"region us-west-2: set \[cloud\] region"):
        await rig.put(b"small")


async def test_credentials_that_stay_expired_are_told(rig: Rig) -> None:
    rig.proxy.add(r"^PUT", status=400, body=error("ExpiredToken"), times=100)
    with pytest.raises(StorageUnavailableError, match="expired and the chain has no newer ones"):
        await rig.put(b"small")


async def test_each_page_of_a_list_has_its_own_tries(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.cloud.s3_bucket.PAGE", 2)
    for n in range(6):
        rig.aws.s3.put_object(Bucket=rig.name, Key=f"p/{n}", Body=b"")
    for skip in range(3):
        rig.proxy.add(r"list-type=2", status=503, body=error("SlowDown"), times=3, skip=1 if skip else 0)
    assert [one.key async for one in rig.bucket.list("p/")] == [f"p/{n}" for n in range(6)]


async def test_damage_is_moved_away_and_healed_by_a_new_upload(rig: Rig) -> None:
    await rig.put(b"right")
    key = rig.store.key_of(object_id(b"right"))
    rig.aws.s3.put_object(Bucket=rig.name, Key=key, Body=b"wrong")
    with pytest.raises(ObjectCorruptError, match=r"corrupt/.*A new upload heals it"):
        await rig.get(b"right")
    assert rig.aws.body(rig.name, f"corrupt/{object_id(b'right').hex()}") == b"wrong"
    with pytest.raises(NotFoundError, match=r"was damaged in the bucket, and was moved to .*corrupt/"):
        await rig.get(b"right")
    assert await rig.put(b"right") is True and await rig.get(b"right") == b"right"
    rig.aws.s3.put_object(Bucket=rig.name, Key=key, Body=b"cut")
    assert await rig.put(b"right") is True and await rig.get(b"right") == b"right"


@pytest.mark.parametrize("size", [100, 2 * PART + 7])
async def test_a_byte_that_is_another_after_its_way_is_noticed(rig: Rig, tmp_path: Path, size: int) -> None:
    data, path = os.urandom(size), tmp_path / "x"
    rig.aws.s3.upload_fileobj(
        io.BytesIO(data), rig.name, "k", Config=TransferConfig(multipart_threshold=PART, multipart_chunksize=PART)
    )
    blob = await rig.bucket.head("k")
    assert blob is not None and ("-" in blob.version) is (size > PART)
    rig.proxy.add("^GET .*/k$", flip=50)
    await download(rig.bucket, blob, path, lambda _: None)
    assert path.read_bytes() == data
    rig.proxy.add("^GET .*/k$", flip=50)
    rig.proxy.add("^GET .*/k$", flip=51)
    with pytest.raises(StorageError, match="comes damaged"):
        await download(rig.bucket, blob, path, lambda _: None)


async def test_leftovers_of_a_process_that_was_killed_are_swept(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_store, "STALE_S", -60.0)
    rig.aws.s3.put_object(Bucket=rig.name, Key="temp/pending-1", Body=b"")
    rig.aws.s3.create_multipart_upload(Bucket=rig.name, Key="temp/pending-2")
    rig.aws.s3.create_multipart_upload(Bucket=rig.name, Key="others/1")
    bucket = S3Bucket(rig.bucket._aws, rig.name, rig.bucket._section)  # pyright: ignore[reportPrivateUsage]
    other = BucketObjectStore(bucket, "", FilePins(tmp_path / "other.db"))
    monkeypatch.setattr(bucket_store, "CORRUPT_KEPT_S", -60.0)
    rig.aws.s3.put_object(Bucket=rig.name, Key="corrupt/1", Body=b"")
    await other._sweep()  # pyright: ignore[reportPrivateUsage]
    assert rig.aws.keys(rig.name) == [] and rig.aws.unfinished(rig.name) == ["others/1"]


async def test_memory_of_an_upload_is_below_three_parts(rig: Rig) -> None:
    """Without the emulator, which keeps what it gets in this process."""
    rig.proxy.add(CREATE, status=200, body=b"<R><UploadId>1</UploadId></R>")
    rig.proxy.add(r"partNumber", status=200, headers={"etag": '"1"'}, times=100)
    rig.proxy.add(COMPLETE, status=200, body=b'<R><ETag>"1"</ETag></R>')
    chunk = bytes(512 << 10)

    async def source() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield chunk

    tracemalloc.start()
    try:
        await rig.bucket.write("k", source(), 100 * len(chunk))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * PART


async def test_a_cancelled_put_leaves_nothing(rig: Rig) -> None:
    rig.proxy.add(PART_PUT, bytes_per_s=100_000)
    task = asyncio.create_task(rig.put())
    await asyncio.wait_for(rig.proxy.reached(PART_PUT), 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.nothing_left()
