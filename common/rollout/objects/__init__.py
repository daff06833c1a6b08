"""Content-addressed bytes: stores for the coordinator; a client, a cache, packs and directory trees for the others."""

from __future__ import annotations

from collections.abc import Callable

from rollout.config.adapters import load_adapter
from rollout.config.settings import ObjectsSection, StorageSection
from rollout.objects.port import ObjectMeta, ObjectStore

__all__ = ["ObjectMeta", "ObjectStore", "open_store"]

GROUP = "rollout.objects"
StoreFactory = Callable[[ObjectsSection, StorageSection], ObjectStore]


def backend_name(objects: ObjectsSection, storage: StorageSection) -> str:
    """`[objects] backend`, or what goes with the storage: postgres with Postgres, else fs."""
    return objects.backend or ("postgres" if storage.backend == "postgres" else "fs")


def open_store(objects: ObjectsSection, storage: StorageSection) -> ObjectStore:
    """The configured store, not opened yet. ConfigError if no installed package provides it."""
    factory: StoreFactory = load_adapter(GROUP, backend_name(objects, storage), "[objects] backend")
    return factory(objects, storage)
