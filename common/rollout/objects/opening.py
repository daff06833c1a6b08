"""The store that is configured."""

from __future__ import annotations

from collections.abc import Callable

from rollout.config.adapters import load_adapter
from rollout.config.cloud import NO_CLOUD, CloudSection
from rollout.config.settings import ObjectsSection, StorageSection
from rollout.objects.port import ObjectStore

GROUP = "rollout.objects"
StoreFactory = Callable[[ObjectsSection, StorageSection, CloudSection], ObjectStore]


def backend_name(objects: ObjectsSection, storage: StorageSection, cloud: CloudSection = NO_CLOUD) -> str:
    """`[objects] backend`, or that of the bucket of `[cloud]`, or what goes with the storage: postgres with Postgres,
    else fs."""
    if objects.backend:
        return objects.backend
    if cloud.bucket:
        return {"aws": "s3", "gcp": "gcs"}[cloud.provider]
    return "postgres" if storage.backend == "postgres" else "fs"


def open_store(objects: ObjectsSection, storage: StorageSection, cloud: CloudSection = NO_CLOUD) -> ObjectStore:
    """The configured store, not opened yet. ConfigError if no installed package provides it."""
    factory: StoreFactory = load_adapter(GROUP, backend_name(objects, storage, cloud), "[objects] backend")
    return factory(objects, storage, cloud)
