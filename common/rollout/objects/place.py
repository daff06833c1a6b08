"""Where a ledger's objects live, remembered in its database: all of them are in one place, whoever starts it."""

from __future__ import annotations

from rollout.config.cloud import NO_CLOUD, CloudSection
from rollout.config.settings import ObjectsSection, StorageSection
from rollout.model.errors import ConfigError
from rollout.objects import backend_name
from rollout.storage.port import Storage

NAMESPACE = "objects"
KEY = "place"


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
        "correct the configuration; or, once all of them were copied, say so: "
        "rollout-coordinator adopt-objects --config FILE"
    )


def shown(place: str) -> str:
    return place if "://" in place else f'the "{place}" store'
