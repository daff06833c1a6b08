"""Place of a ledger's objects, recorded in its database, so that all are in one place whoever starts the coordinator.

A bucket in turn names its ledger; otherwise two ledgers would delete each other's objects.
"""

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
"""Name of the object below the prefix that names the ledger."""
ADOPT = "rollout-coordinator adopt-objects --config FILE"


def place_of(objects: ObjectsSection, storage: StorageSection, cloud: CloudSection) -> str:
    """Return `s3://bucket/prefix/`, `gs://bucket/prefix/`, or the backend's name: a directory may move with its
    database."""
    backend = backend_name(objects, storage, cloud)
    return cloud.place if backend in ("s3", "gcs") else backend


def place_of_old(objects: ObjectsSection, storage: StorageSection) -> str:
    """Return the place for a ledger of a version that did not record it; such versions had no buckets."""
    if objects.backend in ("s3", "gcs"):
        objects = objects.model_copy(update={"backend": ""})
    return place_of(objects, storage, NO_CLOUD)


def key_of(objects: ObjectsSection, cloud: CloudSection) -> str:
    """Return the configuration key that says where objects live."""
    if objects.backend not in ("", "s3", "gcs") or not cloud.bucket:
        return "objects.backend"
    return "cloud.s3.bucket" if cloud.provider == "aws" else "cloud.gcs.bucket"


async def remembered(storage: Storage) -> str:
    """Return the recorded place, or an empty string."""
    found = await storage.get(NAMESPACE, KEY)
    return found.decode() if found else ""


async def remember(storage: Storage, place: str) -> None:
    await storage.put(NAMESPACE, KEY, place.encode())


async def ledger_id(storage: Storage) -> str:
    """Return the ledger's id, which the first call creates."""
    await storage.cas(NAMESPACE, LEDGER, None, str(ULID()).encode())
    found = await storage.get(NAMESPACE, LEDGER)
    assert found is not None
    return found.decode()


async def settle(store: OwnedStore, storage: Storage, key: str, place: str, *, begins: bool) -> None:
    """Ensure that `store` belongs to this ledger.

    `begins` allows the ledger to claim a store without an owner. Raises ConfigError if the store belongs to another
    ledger, or has no owner and therefore lacks this ledger's objects. `key` is the configuration key for the message.
    """
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
    """Replace the recorded place `before` and return the one that is recorded then; another process may have been
    faster."""
    if await storage.cas(NAMESPACE, KEY, before.encode() or None, place.encode()):
        return place
    return await remembered(storage)


def elsewhere(key: str, before: str, now: str) -> ConfigError:
    """Return the error of a coordinator whose configured place is not its ledger's."""
    return ConfigError(
        f"{key}: the objects of this ledger are in {shown(before)}, and this configuration names {shown(now)}: "
        f"correct the configuration; or, once all of them were copied, say so: {ADOPT}"
    )


def shown(place: str) -> str:
    return place if "://" in place else f'the "{place}" store'
