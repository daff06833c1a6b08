"""Where a ledger's objects live, remembered in its database: all of them are in one place, whoever starts it. A bucket
names its ledger in turn, or two of them would free each other's objects."""

from __future__ import annotations

from ulid import ULID

from rollout.config.cloud import NO_CLOUD, CloudSection
from rollout.config.settings import ObjectsSection, StorageSection
from rollout.model.errors import ConfigError
from rollout.objects.opening import backend_name
from rollout.objects.port import OwnedStore
from rollout.storage.port import Storage

NAMESPACE = "objects"
KEY = "place"
LEDGER = "ledger"


MARKER = "ledger.json"
"""Below the prefix: which ledger's objects these are."""
ADOPT = "rollout-coordinator adopt-objects --config FILE"


def place_of(objects: ObjectsSection, storage: StorageSection, cloud: CloudSection) -> str:
    """`s3://bucket/prefix/`, `gs://bucket/prefix/`, or the backend's name: a directory may be moved with its
    database."""
    backend = backend_name(objects, storage, cloud)
    return cloud.place if backend in ("s3", "gcs") else backend


def place_of_old(objects: ObjectsSection, storage: StorageSection) -> str:
    """Of a ledger from before its place was remembered: there were no buckets then."""
    if objects.backend in ("s3", "gcs"):
        objects = objects.model_copy(update={"backend": ""})
    return place_of(objects, storage, NO_CLOUD)


def key_of(objects: ObjectsSection, cloud: CloudSection) -> str:
    """Of the configuration, that says where objects live."""
    if objects.backend not in ("", "s3", "gcs") or not cloud.bucket:
        return "objects.backend"
    return "cloud.s3.bucket" if cloud.provider == "aws" else "cloud.gcs.bucket"


async def remembered(storage: Storage) -> str:
    """Empty: none yet."""
    found = await storage.get(NAMESPACE, KEY)
    return found.decode() if found else ""


async def remember(storage: Storage, place: str) -> None:
    await storage.put(NAMESPACE, KEY, place.encode())


async def ledger_id(storage: Storage) -> str:
    """Made at the first call."""
    await storage.cas(NAMESPACE, LEDGER, None, str(ULID()).encode())
    found = await storage.get(NAMESPACE, LEDGER)
    assert found is not None
    return found.decode()


async def settle(store: OwnedStore, storage: Storage, key: str, place: str, *, begins: bool) -> None:
    """`store` is this ledger's. `begins`: it may become so now, being nobody's. ConfigError: it is another's, or, as
    nobody's, not the one that has the ledger's objects. `key`: of the configuration."""
    mine, owner = await ledger_id(storage), await store.owner()
    if not owner and begins:
        owner = await store.take(mine)
    if not owner:
        raise ConfigError(
            f"{key}: {place} has no {MARKER}, so it is not where the objects of this ledger are: correct the bucket "
            f"and the endpoint; or, once all of them were copied, say so: {ADOPT}"
        )
    if owner != mine:
        raise ConfigError(
            f"{key}: another ledger's objects are in {place}: choose another prefix. If that ledger is gone for good, "
            f"delete {place}{MARKER}: this one then frees what it left"
        )


async def replace_remembered(storage: Storage, before: str, place: str) -> str:
    """The place that is remembered now: another one than `place`, if another process was faster. `before`: what was
    remembered."""
    if await storage.cas(NAMESPACE, KEY, before.encode() or None, place.encode()):
        return place
    return await remembered(storage)


def elsewhere(key: str, before: str, now: str) -> ConfigError:
    """What a coordinator says that was started with another place than its ledger's."""
    return ConfigError(
        f"{key}: the objects of this ledger are in {shown(before)}, and this configuration names {shown(now)}: "
        f"correct the configuration; or, once all of them were copied, say so: {ADOPT}"
    )


def shown(place: str) -> str:
    return place if "://" in place else f'the "{place}" store'
