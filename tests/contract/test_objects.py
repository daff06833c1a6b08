"""One suite for every object store; what only the fs store promises is below it."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections import namedtuple
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import asyncpg
import pytest
from gcs_emulator import Gcs
from moto_locked import AwsEmulator
from rollout.cloud.aws import Aws
from rollout.cloud.gcp import Gcp
from rollout.cloud.gcs_bucket import GcsBucket
from rollout.cloud.s3_bucket import S3Bucket
from rollout.config.settings import EmbeddedStorage, ObjectsSection, PostgresStorage, StorageSection
from rollout.model.errors import (
    ConfigError,
    InputError,
    NotFoundError,
    ObjectCorruptError,
    StorageFullError,
    StorageUnavailableError,
)
from rollout.model.item import Blob, Failure, ObjectSlice, Outcome
from rollout.objects import fs as fs_module
from rollout.objects.bucket_store import BucketObjectStore
from rollout.objects.claims import FilePins
from rollout.objects.digest import CHUNK, object_id
from rollout.objects.fs import FsObjectStore
from rollout.objects.opening import backend_name, open_store
from rollout.objects.port import ObjectStore
from rollout.objects.postgres_pins import storage_errors
from rollout_coordinator.core.events import ResultGroup, WorkerResults
from rollout_coordinator.gc import collect_garbage
from rollout_coordinator.objects_gate import ObjectsGate


class Clock:
    def __init__(self) -> None:
        self.ms = 1_800_000_000_000

    def __call__(self) -> int:
        return self.ms


async def pieces(data: bytes, step: int = 100_000) -> AsyncIterator[bytes]:
    for at in range(0, len(data), step):
        yield data[at : at + step]


async def read(store: ObjectStore, name: bytes, offset: int = 0, length: int | None = None) -> bytes:
    out = b""
    async with aclosing(store.get(name, offset, length)) as source:  # type: ignore[type-var]
        async for piece in source:
            assert 0 < len(piece) <= CHUNK
            out += piece
    return out


async def put(store: ObjectStore, data: bytes) -> bytes:
    await store.put(object_id(data), pieces(data), len(data))
    return object_id(data)


class Refs:
    def __init__(self, *ids: bytes) -> None:
        self.ids = set(ids)

    async def referenced(self, object_ids: list[bytes]) -> set[bytes]:
        return self.ids & set(object_ids)


class StoreContract:
    """Subclass it with fixtures `store` (open) and `clock` for an adapter."""

    BIG = bytes(range(256)) * 5000  # 1.28 MB

    async def test_round_trip_and_ranges(self, store: ObjectStore) -> None:
        name = object_id(self.BIG)
        assert await store.put(name, pieces(self.BIG), len(self.BIG)) is True
        assert await read(store, name) == self.BIG
        for offset, length in [(0, 1), (1, 5), (CHUNK - 1, 2), (262_144, 262_144), (300_000, 700_000), (1, None)]:
            end = None if length is None else offset + length
            assert await read(store, name, offset, length) == self.BIG[offset:end]
        assert await read(store, name, len(self.BIG) - 3, 1 << 62) == self.BIG[-3:]
        assert await read(store, name, len(self.BIG) + 5) == b""

    async def test_parts(self, store: ObjectStore) -> None:
        name = await put(store, self.BIG)
        wanted = [(5, 7), (262_140, 10), (0, 3), (0, 0), (len(self.BIG) - 2, 100), (1 << 40, 1)]
        assert await store.parts(name, wanted) == [self.BIG[at : at + length] for at, length in wanted]
        assert await store.parts(name, []) == []
        with pytest.raises(NotFoundError):
            await store.parts(object_id(b"absent"), [(0, 1)])

    async def test_empty_object(self, store: ObjectStore) -> None:
        name = await put(store, b"")
        assert await read(store, name) == b""
        assert (await store.has([name])) == [True]

    async def test_put_again_reads_nothing_and_says_so(self, store: ObjectStore) -> None:
        name = await put(store, b"once")

        async def never() -> AsyncIterator[bytes]:
            raise AssertionError("nothing to read")
            yield b""

        assert await store.put(name, never(), 4) is False

    @pytest.mark.parametrize("data", [b"wrong bytes!", b"short", b"much too long for it"])
    async def test_what_does_not_match_its_id_never_shows(self, store: ObjectStore, data: bytes) -> None:
        name = object_id(b"promised....")
        with pytest.raises(ObjectCorruptError):
            await store.put(name, pieces(data, 3), 12)
        assert await store.head(name) is None
        assert await store.put(name, pieces(b"promised...."), 12) is True

    async def test_missing_and_malformed(self, store: ObjectStore) -> None:
        name = object_id(b"absent")
        with pytest.raises(NotFoundError):
            await read(store, name)
        assert await store.head(name) is None
        assert await store.delete(name) is False
        with pytest.raises(InputError, match="32 bytes"):
            await store.head(b"../../etc/passwd")

    async def test_many_at_once(self, store: ObjectStore) -> None:
        blobs = [str(i % 10).encode() * 50_000 for i in range(40)]
        names = await asyncio.gather(*[put(store, b) for b in blobs])
        assert await store.has(list(names)) == [True] * 40
        listed = {m.object_id async for m in store.list()}
        assert listed == set(names)
        assert all(await asyncio.gather(*[read(store, n) for n in set(names)]))

    async def test_pins_keep_from_deletion_until_they_expire(self, store: ObjectStore, clock: Clock) -> None:
        a, b = await put(store, b"a"), await put(store, b"b")
        await store.pin([a], "run-1", 10)
        await store.pin([a, b], "run-2", 100)
        await store.pin([a], "run-2", 1)  # never shortens
        assert await store.pinned([a, b]) == {a, b}
        assert await store.delete(a) is False
        clock.ms += 11_000
        await store.unpin("run-1")
        assert await store.pinned([a]) == {a}
        await store.unpin("run-2")
        assert await store.pinned([a, b]) == set()
        assert await store.delete(a) is True
        await store.pin([b], "run-3", 5)
        clock.ms += 5_001
        assert await store.pinned([b]) == set()

    async def test_collection_frees_only_what_is_old_loose_and_unpinned(self, store: ObjectStore) -> None:
        names = [await put(store, str(i).encode()) for i in range(4)]
        referenced, pinned, loose, _ = names
        await store.pin([pinned], "run", 3600)
        newest = max([m.created_ms async for m in store.list()])
        young = await collect_garbage(store, Refs(referenced), 60, now_ms=lambda: newest + 59_000)
        assert (young.objects, young.kept) == (0, 4)
        gate = ObjectsGate(store)
        assert await gate.missing(names) == set()
        done = await collect_garbage(store, Refs(referenced), 60, now_ms=lambda: newest + 61_000, forget=gate.forget)
        assert await gate.missing(names) == set(names[2:]), "what was collected is not taken for stored"
        assert (done.objects, done.bytes, done.kept) == (2, 2, 2)
        assert await store.has(names) == [True, True, False, False]
        assert await store.put(loose, pieces(b"2"), 1) is True

    async def test_a_result_that_names_what_was_never_stored_is_tried_again(self, store: ObjectStore) -> None:
        there, lost = await put(store, b"there"), b"l" * 32
        data: list[Blob] = [ObjectSlice(lost, 0, 1), b"inline", b"inline", b"evidence"]
        outcome = [Outcome.DONE] * 3 + [Outcome.FAILED]
        keeps = {1: (there, lost), 2: (there,), 3: (lost,)}
        own = {3: Failure("own", "it broke", False)}
        group = ResultGroup(1, [0, 1, 2, 3], [1] * 4, outcome, data, own, [0] * 4, keeps=keeps)
        await ObjectsGate(store).check_results(WorkerResults("S", [group]))
        assert [int(one) for one in group.outcome or ()] == [2, 2, 1, 2] and group.keeps == {2: (there,)}
        assert {i: (f.code, f.retryable) for i, f in group.failures.items()} == {
            0: ("object_missing", True),
            1: ("object_missing", True),
            3: ("own", False),
        }
        assert group.data[3] == b"", "an attempt that failed has failed as it did, without its evidence"


class TestFs(StoreContract):
    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    async def store(self, tmp_path: Path, clock: Clock) -> AsyncIterator[FsObjectStore]:
        store = FsObjectStore(tmp_path / "objects", now_ms=clock)
        await store.open()
        yield store
        await store.close()


class TestPostgres(StoreContract):
    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    async def store(self, postgres_url: str, clock: Clock) -> AsyncIterator[ObjectStore]:
        from rollout.objects.postgres import PostgresObjectStore

        store = PostgresObjectStore(postgres_url, pool_size=4, now_ms=clock)
        await store.open()
        yield store
        await store.close()


class TestS3(StoreContract):
    BIG = bytes(range(256)) * 50_000  # 12.8 MB: larger than a part

    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    async def store(self, aws: AwsEmulator, tmp_path: Path, clock: Clock) -> AsyncIterator[ObjectStore]:
        cloud = aws.cloud(s3={"bucket": aws.bucket(), "prefix": "some/where", "multipart_chunk_bytes": 5 << 20})
        store = BucketObjectStore(
            S3Bucket(Aws(cloud), cloud.s3.bucket, cloud.s3, own_session=True),
            cloud.s3.prefix,
            FilePins(tmp_path / "pins.db", now_ms=clock),
        )
        await store.open()
        yield store
        await store.close()
        assert [key for key in aws.keys(cloud.s3.bucket) if "/cas/" not in key] == []
        assert aws.unfinished(cloud.s3.bucket) == []


class TestGcs(StoreContract):
    BIG = TestS3.BIG

    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    async def store(self, gcs: Gcs, tmp_path: Path, clock: Clock) -> AsyncIterator[ObjectStore]:
        cloud = gcs.cloud(prefix="some/where", resumable_chunk_bytes=5 << 20)
        bucket = GcsBucket(Gcp(cloud), cloud.bucket, cloud.gcs)
        store = BucketObjectStore(bucket, cloud.gcs.prefix, FilePins(tmp_path / "pins.db", now_ms=clock))
        await store.open()
        yield store
        await store.close()
        assert all("/cas/" in key for key in gcs.names()) and gcs.unfinished() == []


@pytest.fixture
async def fs_store(tmp_path: Path) -> AsyncIterator[FsObjectStore]:
    store = FsObjectStore(tmp_path / "o", reserve_bytes=0)
    await store.open()
    yield store
    await store.close()


async def test_fs_layout_is_the_documented_one(fs_store: FsObjectStore, tmp_path: Path) -> None:
    name = (await put(fs_store, b"x")).hex()
    shard = tmp_path / "o" / "cas" / name[:2] / name[2:4]
    assert sorted(p.name for p in shard.iterdir()) == [name, name + ".meta.json"]
    assert (shard / name).read_bytes() == b"x"
    assert '"size": 1' in (shard / (name + ".meta.json")).read_text()
    assert list((tmp_path / "o" / "tmp").iterdir()) == []


async def test_fs_objects_in_the_layout_before_are_found_where_they_are(
    fs_store: FsObjectStore, tmp_path: Path
) -> None:
    """A process of an older version may share the directory."""
    names = [await put(fs_store, str(n).encode()) for n in range(4)]
    root = tmp_path / "o"
    for shard in (root / "cas").iterdir():
        shard.rename(root / shard.name)
    again = FsObjectStore(root, reserve_bytes=0)
    await again.open()
    names.append(await put(again, b"new"))
    assert [await read(again, name) for name in names] == [b"0", b"1", b"2", b"3", b"new"]
    assert await again.parts(names[0], [(0, 1)]) == [b"0"] and await again.has(names) == [True] * 5
    assert {meta.object_id async for meta in again.list()} == set(names)
    assert await put(again, b"0") == names[0] and not again.path_of(names[0]).exists(), "it is there"
    assert await again.delete(names[0]) is True and await again.head(names[0]) is None
    old = names[1].hex()
    assert (root / old[:2] / old[2:4] / old).exists(), "an older process finds it"
    await again.close()


async def test_objects_copied_by_hand_between_stores_are_there(
    fs_store: FsObjectStore, tmp_path: Path, aws: AwsEmulator
) -> None:
    name = await put(fs_store, b"a snapshot")
    key = str(fs_store.path_of(name).relative_to(tmp_path / "o"))
    cloud = aws.cloud(s3={"bucket": aws.bucket()})
    aws.s3.put_object(Bucket=cloud.bucket, Key=key, Body=fs_store.path_of(name).read_bytes())
    storage = StorageSection(embedded=EmbeddedStorage(path=str(tmp_path / "ledger" / "rollout.db")))
    store = open_store(ObjectsSection(), storage, cloud)
    await store.open()
    assert await read(store, name) == b"a snapshot" and await store.has([name]) == [True]
    await store.close()


async def test_fs_bit_rot_is_reported_and_healed_by_a_new_upload(fs_store: FsObjectStore, tmp_path: Path) -> None:
    data = b"z" * 1_000_000
    name = await put(fs_store, data)
    with fs_store.path_of(name).open("r+b") as file:
        file.seek(999_999)
        file.write(b"!")
    with pytest.raises(ObjectCorruptError, match="does not match its id"):
        await read(fs_store, name)
    assert (tmp_path / "o" / "corrupt" / name.hex()).exists()
    with pytest.raises(NotFoundError, match="was damaged, and was moved to"):
        await read(fs_store, name)
    assert await fs_store.put(name, pieces(data), len(data)) is True
    assert await read(fs_store, name) == data


async def test_fs_truncated_blob_is_replaced(fs_store: FsObjectStore) -> None:
    name = await put(fs_store, b"whole")
    fs_store.path_of(name).write_bytes(b"who")
    with pytest.raises(ObjectCorruptError):
        await read(fs_store, name)
    assert await fs_store.put(name, pieces(b"whole"), 5) is True


async def test_fs_full_disk(fs_store: FsObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 9, 1))
    with pytest.raises(StorageFullError):
        await put(fs_store, b"ten bytes.")
    monkeypatch.undo()

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fs_module.os, "fsync", full)
    with pytest.raises(StorageFullError, match="No space left"):
        await put(fs_store, b"ten bytes.")
    monkeypatch.undo()
    assert list((tmp_path / "o" / "tmp").iterdir()) == []
    await put(fs_store, b"ten bytes.")


@pytest.mark.parametrize("instead", ["nothing", "a file"])
async def test_fs_of_a_store_that_is_moved_away_nothing_is_missing(
    fs_store: FsObjectStore, tmp_path: Path, instead: str
) -> None:
    name, absent = await put(fs_store, b"here"), object_id(b"absent")
    root = fs_store.path_of(name).parents[3]
    root.rename(tmp_path / "elsewhere")
    if instead == "a file":
        root.write_text("")
    for call in (
        read(fs_store, name), read(fs_store, absent), fs_store.parts(name, [(0, 1)]), put(fs_store, b"more"),
        fs_store.has([name]),
    ):  # fmt: skip
        with pytest.raises(StorageUnavailableError, match="is not there: put it back"):
            await call
    root.unlink(missing_ok=True)
    (tmp_path / "elsewhere").rename(root)
    assert await read(fs_store, name) == b"here" and await fs_store.has([name, absent]) == [True, False]
    await put(fs_store, b"more")


async def test_fs_cancelled_upload_leaves_nothing(fs_store: FsObjectStore, tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"be"
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(fs_store.put(object_id(b"begun"), slow(), 5))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list((tmp_path / "o" / "tmp").iterdir()) == []
    assert await fs_store.has([object_id(b"begun")]) == [False]


async def test_fs_two_processes_see_each_others_pins(tmp_path: Path) -> None:
    one, two = FsObjectStore(tmp_path / "o"), FsObjectStore(tmp_path / "o")
    await asyncio.gather(one.open(), two.open())
    name = await put(one, b"shared")
    await one.pin([name], "w", 60)
    assert await two.pinned([name]) == {name}
    assert await two.delete(name) is False
    await one.close()
    await two.close()


async def test_fs_old_leftovers_are_swept_at_open(tmp_path: Path) -> None:
    tmp = tmp_path / "o" / "tmp"
    tmp.mkdir(parents=True)
    (tmp / "old").write_bytes(b"x")
    os.utime(tmp / "old", (1, 1))
    (tmp / "running").write_bytes(b"x")
    store = FsObjectStore(tmp_path / "o")
    await store.open()
    assert [p.name for p in tmp.iterdir()] == ["running"]
    await store.close()


def test_backend_follows_the_storage() -> None:
    postgres = StorageSection(backend="postgres", postgres=PostgresStorage(url="postgresql://x/y"))
    assert backend_name(ObjectsSection(), StorageSection()) == "fs"
    assert backend_name(ObjectsSection(), postgres) == "postgres"
    assert backend_name(ObjectsSection(backend="fs"), postgres) == "fs"
    assert isinstance(open_store(ObjectsSection(), StorageSection()), FsObjectStore)
    with pytest.raises(ConfigError, match='"tape"; known: fs, gcs, postgres, s3'):
        open_store(ObjectsSection(backend="tape"), StorageSection())


@pytest.mark.parametrize(
    "error",
    [
        asyncpg.InternalClientError("cannot switch to state 12; another operation (2) is in progress"),
        asyncpg.InterfaceError("connection is closed"),
        asyncpg.CannotConnectNowError("the database system is starting up"),
        asyncpg.DeadlockDetectedError("deadlock detected"),
        ConnectionResetError("Connection reset by peer"),
        TimeoutError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_database_that_goes_away_is_worth_another_try(error: Exception) -> None:
    """The first was seen in a fault campaign: it left the store as it was, and ended a client for good."""
    with pytest.raises(StorageUnavailableError, match="cannot be reached") as found, storage_errors("object 1"):
        raise error
    assert found.value.retryable
