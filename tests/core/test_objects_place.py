"""All objects of a ledger are in one place: another one is refused until somebody says that they were moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from memory_bucket import MemoryBucket
from rollout.client.embedded_cloud import cloud_of, cloud_sections, of_its_own, rewrite_cloud, write_sections
from rollout.config.cloud import CloudSection
from rollout.config.settings import (
    CoordinatorSettings,
    EmbeddedStorage,
    ObjectsSection,
    PostgresStorage,
    StorageSection,
)
from rollout.files import FileLock
from rollout.model.errors import ConfigError
from rollout.objects.bucket_store import BucketObjectStore
from rollout.objects.claims import FilePins
from rollout.objects.place import remember, remembered, settle
from rollout.objects.port import ObjectStore
from rollout.storage.kv_sqlite import SqliteStorage
from rollout_coordinator.adopting import adopt, nobody_leads
from rollout_coordinator.lease import file_lock_path
from rollout_coordinator.ledger import Ledger
from rollout_coordinator.ledger.port import LeaseRow
from rollout_coordinator.objects_opening import open_objects


class Store:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.opened = 0

    async def open(self) -> None:
        if self.error is not None:
            raise self.error
        self.opened += 1


def settings(bucket: str = "", backend: str = "") -> CoordinatorSettings:
    cloud = CloudSection(provider="aws", s3=cast(Any, {"bucket": bucket})) if bucket else CloudSection()
    return CoordinatorSettings(cloud=cloud, objects=ObjectsSection(backend=backend))


async def opened(
    storage: SqliteStorage, given: CoordinatorSettings, store: Store | BucketObjectStore, *, runs: bool = True
) -> None:
    async def has_runs() -> bool:
        return runs

    await open_objects(cast(ObjectStore, store), storage, given, has_runs)


@pytest.fixture
async def storage(tmp_path: Path) -> Any:
    storage = SqliteStorage(str(tmp_path / "rollout.db"))
    await storage.open()
    yield storage
    await storage.close()


async def test_the_first_place_is_remembered_and_another_refused(storage: SqliteStorage) -> None:
    await opened(storage, settings("first"), Store(), runs=False)
    assert await remembered(storage) == "s3://first/"
    await opened(storage, settings("first"), Store())
    for other, key in ((settings("second"), "cloud.s3.bucket: "), (settings(), "objects.backend: ")):
        store = Store()
        with pytest.raises(ConfigError) as error:
            await opened(storage, other, store)
        assert error.value.message.startswith(key)
        assert "s3://first/" in error.value.message and "rollout-coordinator adopt-objects" in error.value.message
        assert not store.opened


async def test_a_ledger_from_before_there_were_buckets_is_where_it_was(storage: SqliteStorage) -> None:
    store = Store()
    with pytest.raises(ConfigError, match=r'^cloud\.s3\.bucket: .*"fs".*adopt-objects'):
        await opened(storage, settings("first"), store)
    assert not store.opened and await remembered(storage) == ""
    await opened(storage, settings(), Store())
    assert await remembered(storage) == "fs"


async def test_a_standby_does_not_change_the_place_that_another_coordinator_has_written(storage: SqliteStorage) -> None:
    async def leader_is_faster() -> bool:
        await opened(storage, settings("first"), Store(), runs=False)
        return False

    with pytest.raises(ConfigError, match="s3://first/"):
        await open_objects(cast(ObjectStore, Store()), storage, settings("second"), leader_is_faster)
    postgres = StorageSection(backend="postgres", postgres=PostgresStorage(url="postgresql://h/d"))
    shared = settings("second").model_copy(update={"storage": postgres})
    with pytest.raises(ConfigError, match="s3://first/"):
        await opened(storage, shared, Store(), runs=False)
    assert await remembered(storage) == "s3://first/"


async def test_a_ledger_without_runs_has_no_place(storage: SqliteStorage) -> None:
    await opened(storage, settings("first"), Store(), runs=False)
    await opened(storage, settings("second"), Store(), runs=False)
    assert await remembered(storage) == "s3://second/"


async def test_an_adopted_place_holds(storage: SqliteStorage) -> None:
    await opened(storage, settings("first"), Store(), runs=False)
    await remember(storage, "s3://second/")
    await opened(storage, settings("second"), Store())


async def test_a_bucket_that_is_not_there_is_told_by_its_key_and_not_remembered(storage: SqliteStorage) -> None:
    with pytest.raises(ConfigError) as error:
        await opened(
            storage, settings("first"), Store(ConfigError("s3://first/ cannot be used: NoSuchBucket")), runs=False
        )
    assert error.value.message.startswith("cloud.s3.bucket: s3://first/ ") and "NoSuchBucket" in error.value.message
    assert await remembered(storage) == ""


@pytest.fixture
async def others(tmp_path: Path) -> Any:
    storage = SqliteStorage(str(tmp_path / "others.db"))
    await storage.open()
    yield storage
    await storage.close()


async def test_a_bucket_has_the_objects_of_one_ledger(
    storage: SqliteStorage, others: SqliteStorage, tmp_path: Path
) -> None:
    bucket, other_bucket = MemoryBucket("first"), MemoryBucket("first")
    store = BucketObjectStore(bucket, "p/", FilePins(tmp_path / "pins.db"))
    given = settings("first")
    await opened(storage, given, store, runs=False)
    await store.close()
    assert list(bucket.objects) == ["p/ledger.json"]
    await opened(storage, given, store)
    await store.close()
    with pytest.raises(ConfigError, match=r"^cloud\.s3\.prefix: another ledger"):
        await opened(others, given, store, runs=False)
    elsewhere = BucketObjectStore(other_bucket, "p/", FilePins(tmp_path / "pins.db"))  # another endpoint
    with pytest.raises(ConfigError, match=r"has no ledger.json.*adopt-objects"):
        await opened(storage, given, elsewhere)
    await settle(elsewhere, storage, "key", "place", begins=True)  # as adopt-objects does
    await opened(storage, given, elsewhere)
    await elsewhere.close()


def test_one_file_serves_several_private_clusters(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    cloud = CloudSection(provider="aws", s3=cast(Any, {"bucket": "first", "prefix": "p/"}))
    one, other = of_its_own(tmp_path / "a", cloud), of_its_own(tmp_path / "b", cloud)
    assert one.place.startswith("s3://first/p/private/") and one.place != other.place
    assert of_its_own(tmp_path / "a", cloud) == one
    assert not of_its_own(tmp_path / "a", CloudSection()).provider


def test_what_is_written_for_a_private_cluster_is_read_again(tmp_path: Path) -> None:
    cloud = CloudSection.model_validate(
        {
            "provider": "aws",
            "region": "us-west-2",
            "s3": {"bucket": "first", "prefix": 'a "b"'},
            "secrets": {"allowlist": ["x/y"], "ttl_secs": 5.0},
        }
    )
    write_sections(
        tmp_path / "coordinator.toml",
        {"storage": {"backend": "embedded"}, "objects": {"backend": ""}, **cloud_sections(cloud)},
    )
    assert cloud_of(tmp_path) == cloud
    rewrite_cloud(tmp_path, cloud.model_copy(update={"region": "us-east-1"}))
    assert (cloud_of(tmp_path).region, cloud_of(tmp_path).s3) == ("us-east-1", cloud.s3)
    assert not cloud_of(tmp_path / "nothing").provider
    assert cloud_sections(CloudSection()) == {}


async def test_nothing_is_adopted_for_a_ledger_that_is_not_there(tmp_path: Path) -> None:
    """A wrong path or directory: an empty ledger would take the bucket from the one that it is meant for."""
    path = tmp_path / "data" / "rollout.db"
    given = CoordinatorSettings(storage=StorageSection(embedded=EmbeddedStorage(path=str(path))))
    with pytest.raises(ConfigError, match=rf"^storage\.embedded\.path: {path} "):
        await adopt(given)
    assert not path.parent.exists()
    path.parent.mkdir()
    empty = SqliteStorage(str(path))
    await empty.open()
    await empty.close()
    with pytest.raises(ConfigError, match=r"no coordinator ran here, so there is no ledger"):
        await adopt(given)


async def test_nothing_is_adopted_while_a_coordinator_runs(tmp_path: Path) -> None:
    """What it writes from then on would be in the old place."""
    path = tmp_path / "rollout.db"
    path.touch()
    lock = FileLock(file_lock_path(path))
    assert lock.try_acquire()
    with pytest.raises(ConfigError, match=r"a coordinator runs on .*: stop all of them first"):
        await adopt(CoordinatorSettings(storage=StorageSection(embedded=EmbeddedStorage(path=str(path)))))
    lock.release()


async def test_a_lease_that_is_renewed_is_of_a_coordinator_that_runs() -> None:
    class Leading:
        def __init__(self, beats: list[int], *, released: bool = False) -> None:
            self.beats, self.released = beats, released

        async def read_lease(self) -> LeaseRow:
            beat = self.beats.pop(0) if len(self.beats) > 1 else self.beats[0]
            return LeaseRow("x", 1, 1, beat, self.released, "host:1")

    with pytest.raises(ConfigError, match="host:1"):
        await nobody_leads(cast(Ledger, Leading([1, 1, 2])), 0.1)
    await nobody_leads(cast(Ledger, Leading([1])), 0.1)
    await nobody_leads(cast(Ledger, Leading([1, 2, 3], released=True)), 60)
