"""The object store over a bucket in memory: what is awkward to bring about on an emulator."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
from memory_bucket import MemoryBucket
from rollout.model.errors import ConfigError, StorageError, StorageUnavailableError, UnavailableError
from rollout.objects import bucket_store
from rollout.objects.bucket_store import BucketObjectStore
from rollout.objects.claims import FilePins
from rollout.objects.digest import object_id
from rollout_coordinator.gc import collect_garbage
from rollout_coordinator.objects_gate import ObjectsGate
from rollout_coordinator.objects_service import stall_watch

DATA = os.urandom(3000)
NAME = object_id(DATA)


@pytest.fixture
def bucket() -> MemoryBucket:
    return MemoryBucket()


@pytest.fixture
async def store(bucket: MemoryBucket, tmp_path: Path) -> AsyncIterator[BucketObjectStore]:
    store = BucketObjectStore(bucket, "", FilePins(tmp_path / "pins.db"))
    await store.open()
    yield store
    bucket.before = lambda what, key: None
    await store.close()


async def put(store: BucketObjectStore, data: bytes = DATA) -> bytes:
    async def chunks() -> AsyncIterator[bytes]:
        yield data

    await store.put(object_id(data), chunks(), len(data))
    return object_id(data)


async def get(store: BucketObjectStore, name: bytes = NAME) -> bytes:
    async with aclosing(store.get(name)) as pieces:
        return b"".join([piece async for piece in pieces])


async def test_what_a_person_must_mend_is_waited_for(bucket: MemoryBucket, store: BucketObjectStore) -> None:
    await put(store)

    def expired(what: str, key: str) -> None:
        raise ConfigError("the credentials have expired")

    bucket.before = expired
    for call in (put(store), get(store), store.has([NAME])):
        with pytest.raises(StorageUnavailableError, match="have expired"):
            await call


@pytest.mark.parametrize("room", [0, 1000, 2500])
async def test_without_memory_bytes_pass_as_they_come(
    bucket: MemoryBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(bucket_store, "MEMORY", room)
    monkeypatch.setattr(bucket_store, "RANGE", 1000)
    small = BucketObjectStore(bucket, "", FilePins(tmp_path / "pins.db"))
    await small.open()
    await asyncio.gather(put(small), put(small, b"another"))
    assert await asyncio.gather(get(small), get(small)) == [DATA, DATA]
    await small.close()


async def test_damage_that_was_healed_meanwhile_is_read_again(bucket: MemoryBucket, store: BucketObjectStore) -> None:
    await put(store)
    key = store.key_of(NAME)
    bucket.put(key, bytes(len(DATA)))

    def heal(what: str, at: str) -> None:
        if what == "write" and at.startswith("corrupt/"):
            bucket.put(key, DATA)

    bucket.before = heal
    with pytest.raises(StorageUnavailableError, match="has changed meanwhile"):
        await get(store)
    assert await get(store) == DATA


async def test_a_deletion_that_fails_keeps_no_other_and_is_not_believed_in(
    bucket: MemoryBucket, store: BucketObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [await put(store, data) for data in (b"1", b"2", b"3")]
    gate = ObjectsGate(store)
    assert await gate.missing(names) == set()
    delete = bucket.delete
    failing = store.key_of(min(names))

    async def unheard(key: str, *, version: str = "") -> bool:
        await delete(key)
        if key == failing:
            raise StorageError("no answer")
        return True

    class Refs:
        async def referenced(self, object_ids: list[bytes]) -> set[bytes]:
            return set()

    monkeypatch.setattr(bucket, "delete", unheard)
    done = await collect_garbage(store, Refs(), -10, forget=gate.forget)
    assert done.objects == 2 and await gate.missing(names) == set(names)


async def test_only_what_is_waited_for_can_stall() -> None:
    async with stall_watch(0.05) as watch:
        watch.rest()
        await asyncio.sleep(0.2)
    with pytest.raises(UnavailableError, match="nothing moved"):
        async with stall_watch(0.05) as watch:
            watch.rest()
            await asyncio.sleep(0.1)
            watch.mark()
            await asyncio.sleep(5)
