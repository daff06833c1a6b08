"""Opens the configured store."""

from __future__ import annotations

from collections.abc import Callable

from rollout.config.adapters import load_adapter
from rollout.config.cloud import NO_CLOUD, CloudSection
from rollout.config.settings import ObjectsSection, StorageSection
from rollout.objects.port import ObjectStore

GROUP = "rollout.objects"
StoreFactory = Callable[[ObjectsSection, StorageSection, CloudSection], ObjectStore]


def backend_name(objects: ObjectsSection, storage: StorageSection, cloud: CloudSection = NO_CLOUD) -> str:
    """Return `[objects] backend`, or else the one of the bucket in `[cloud]`, or else postgres with Postgres and fs
    otherwise."""
    if objects.backend:
        return objects.backend
    if cloud.bucket:
        return {"aws": "s3", "gcp": "gcs"}[cloud.provider]
    return "postgres" if storage.backend == "postgres" else "fs"


def open_store(objects: ObjectsSection, storage: StorageSection, cloud: CloudSection = NO_CLOUD) -> ObjectStore:
    """Return the configured store, not opened yet. Raises ConfigError if no installed package provides it."""
    factory: StoreFactory = load_adapter(GROUP, backend_name(objects, storage, cloud), "[objects] backend")
    return factory(objects, storage, cloud)
