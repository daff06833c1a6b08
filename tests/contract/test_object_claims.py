"""Pins of a bucket's objects, and deletions that no transaction can hold: over SQLite and Postgres."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from memory_bucket import MemoryBucket
from rollout.model.errors import StorageUnavailableError
from rollout.objects import bucket_store
from rollout.objects.bucket_store import BucketObjectStore
from rollout.objects.claims import FilePins, Pins
from rollout.objects.digest import object_id
from rollout.objects.postgres_pins import PostgresPins

DATA = b"bytes of an object"
NAME = object_id(DATA)
MakePins = Callable[[float], Pins]


@pytest.fixture(params=["file", "postgres"])
def make_pins(request: pytest.FixtureRequest, tmp_path: Path) -> MakePins:
    """Of one process; each call is another. It is given how long a claim lives (s)."""
    if request.param == "file":
        return lambda claim_s: FilePins(tmp_path / "pins.db", claim_s=claim_s)
    url = request.getfixturevalue("postgres_url")
    return lambda claim_s: PostgresPins(url, pool_size=2, claim_s=claim_s)


class Slow(MemoryBucket):
    """Deletions wait until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = asyncio.Event(), asyncio.Event()

    def age(self, seconds: int) -> None:
        for key, (body, blob) in self.objects.items():
            self.objects[key] = body, replace(blob, modified_ms=blob.modified_ms - seconds * 1000)

    async def delete(self, key: str, *, version: str = "") -> bool:
        self.begun.set()
        await self.go.wait()
        return await super().delete(key, version=version)


@pytest.fixture
async def stores(make_pins: MakePins) -> AsyncIterator[tuple[Slow, BucketObjectStore, BucketObjectStore]]:
    """A bucket and the stores of two processes over it; the object is there."""
    bucket = Slow()
    one, two = BucketObjectStore(bucket, "", make_pins(60.0)), BucketObjectStore(bucket, "", make_pins(60.0))
    await asyncio.gather(one.open(), two.open())
    await one.put(NAME, chunks(), len(DATA))
    yield bucket, one, two
    bucket.go.set()
    await one.close()
    await two.close()


async def chunks() -> AsyncGenerator[bytes]:
    yield DATA


async def read(store: BucketObjectStore) -> bytes:
    async with aclosing(store.get(NAME)) as pieces:
        return b"".join([piece async for piece in pieces])


async def still_waits(task: asyncio.Task[object]) -> None:
    done, _ = await asyncio.wait({task}, timeout=0.2)
    assert not done


async def test_a_pin_that_meets_a_deletion_waits_and_then_knows(
    stores: tuple[Slow, BucketObjectStore, BucketObjectStore],
) -> None:
    bucket, one, two = stores
    deleting = asyncio.create_task(one.delete(NAME))
    await bucket.begun.wait()
    pinning = asyncio.create_task(two.pin([NAME], "run", 60))
    await still_waits(pinning)
    bucket.go.set()
    await pinning
    assert await deleting is True
    assert await two.has([NAME]) == [False], "whoever pinned it is told the truth, and puts it again"
    assert await two.put(NAME, chunks(), len(DATA)) is True
    assert await one.delete(NAME) is False


async def test_a_pin_of_many_waits_only_for_what_is_deleted(
    stores: tuple[Slow, BucketObjectStore, BucketObjectStore],
) -> None:
    bucket, one, two = stores
    other = object_id(b"other")
    deleting = asyncio.create_task(one.delete(NAME))
    await bucket.begun.wait()
    pinning = asyncio.create_task(two.pin([NAME, other], "run", 60))
    await still_waits(pinning)
    assert await one.pinned([NAME, other]) == {other}
    bucket.go.set()
    await asyncio.gather(deleting, pinning)
    assert await one.pinned([NAME, other]) == {NAME, other}


async def test_a_put_that_meets_a_deletion_does_not_take_it_for_stored(
    stores: tuple[Slow, BucketObjectStore, BucketObjectStore],
) -> None:
    bucket, one, two = stores
    deleting = asyncio.create_task(one.delete(NAME))
    await bucket.begun.wait()
    putting = asyncio.create_task(two.put(NAME, chunks(), len(DATA)))
    await still_waits(putting)
    bucket.go.set()
    assert await deleting is True and await putting is True
    assert await read(two) == DATA


async def test_one_deletes_at_a_time_and_a_pin_keeps_both_away(
    stores: tuple[Slow, BucketObjectStore, BucketObjectStore],
) -> None:
    bucket, one, two = stores
    await two.pin([NAME], "run", 60)
    assert await one.delete(NAME) is False and not bucket.begun.is_set()
    await two.unpin("run")
    deleting = asyncio.create_task(one.delete(NAME))
    await bucket.begun.wait()
    assert await two.delete(NAME) is False
    bucket.go.set()
    assert await deleting is True


async def test_a_deletion_that_is_cancelled_still_ends(
    stores: tuple[Slow, BucketObjectStore, BucketObjectStore],
) -> None:
    bucket, one, two = stores
    deleting = asyncio.create_task(one.delete(NAME))
    await bucket.begun.wait()
    deleting.cancel()
    await still_waits(deleting)
    bucket.go.set()
    with pytest.raises(asyncio.CancelledError):
        await deleting
    await two.pin([NAME], "run", 60)
    assert await two.has([NAME]) == [False]


async def test_the_claim_of_a_process_that_died_ends(make_pins: MakePins) -> None:
    dead, alive = make_pins(0.5), make_pins(0.5)
    await dead.open()
    await alive.open()
    owner = await dead.claim(NAME)
    await dead.close()
    assert owner and await alive.claim(NAME) == ""
    await asyncio.wait_for(alive.pin([NAME], "run", 60), 10)
    assert await alive.pinned([NAME]) == {NAME}
    await alive.release(NAME, owner)  # that of another, and gone: nothing happens
    await alive.close()


async def test_a_deletion_without_an_answer_keeps_its_claim(
    make_pins: MakePins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_store, "DELETE_S", 0.1)
    bucket = Slow()
    store = BucketObjectStore(bucket, "", make_pins(1.0))
    await store.open()
    await store.put(NAME, chunks(), len(DATA))
    with pytest.raises(StorageUnavailableError, match="was not deleted in"):
        await store.delete(NAME)
    pinning = asyncio.create_task(store.pin([NAME], "run", 60))
    await still_waits(pinning)
    await pinning
    await store.close()


async def test_a_put_again_begins_its_grace_anew(make_pins: MakePins) -> None:
    bucket = Slow()
    store = BucketObjectStore(bucket, "p/", make_pins(60.0))
    await store.open()
    await store.put(NAME, chunks(), len(DATA))
    bucket.age(1_000_000)
    (old,) = [meta async for meta in store.list()]
    assert await store.put(NAME, chunks(), len(DATA)) is False
    (new,) = [meta async for meta in store.list()]
    assert new.created_ms >= old.created_ms + 1_000_000 * 1000 - 5000
    assert await store.head(NAME) == new
    await store.close()
