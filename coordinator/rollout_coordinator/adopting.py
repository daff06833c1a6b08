"""Adopts objects that a user moved: checks that all of a ledger's objects are there, and records the new place."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rollout.client.embedded_cloud import COORDINATOR_FILE, of_its_own, rewrite_cloud
from rollout.client.private import DATABASE, state_of
from rollout.config.cloud import CloudSection
from rollout.config.load import load_settings
from rollout.config.settings import CoordinatorSettings, StorageSection
from rollout.files import FileLock
from rollout.model.errors import ConfigError
from rollout.objects.opening import open_store
from rollout.objects.place import key_of, place_of, place_of_old, remember, remembered, settle, shown
from rollout.objects.port import ObjectStore, OwnedStore
from rollout.storage import open_storage

from rollout_coordinator.lease import file_lock_path
from rollout_coordinator.ledger import Ledger, open_ledger

RUNS_MAX = 1_000_000
_BATCH = 500
_STOP = "stop all of them first, or what they write goes on to the old place"
_NAMED = 3
"""Number of missing objects to name."""


def settings_of_state(directory: Path, cloud: CloudSection) -> tuple[Path, CoordinatorSettings]:
    """Return the settings of the private cluster in `directory`, with another [cloud]. Raises ConfigError if there is
    none."""
    state = state_of(directory)
    if state is None:
        raise ConfigError(f"--state: there is no private cluster in {directory} ({DATABASE} and {COORDINATOR_FILE})")
    settings = load_settings(CoordinatorSettings, state / COORDINATOR_FILE, environ={})
    cloud = of_its_own(state, cloud)
    objects = settings.objects.model_copy(update={"backend": "" if cloud.bucket else "fs"})
    return state, settings.model_copy(update={"cloud": cloud, "objects": objects})


async def adopt(settings: CoordinatorSettings, state: Path | None = None) -> str:
    """Adopt the objects, and return a message for the user. Raises ConfigError if objects are missing or a coordinator
    runs."""
    lock = _lock_of(settings.storage)
    try:
        return await _adopt(settings, state)
    finally:
        if lock is not None:
            lock.release()


async def _adopt(settings: CoordinatorSettings, state: Path | None) -> str:
    place = place_of(settings.objects, settings.storage, settings.cloud)
    storage = open_storage(settings.storage)
    ledger = open_ledger(settings.storage)
    store = open_store(settings.objects, settings.storage, settings.cloud)
    postgres = settings.storage.backend == "postgres"
    await storage.open()
    try:
        await ledger.open()
        if postgres:
            await nobody_leads(ledger, settings.transport.coordinator_failure_timeout_ms / 1000)
        await store.open()
        known = await remembered(storage)
        if not known and not await ledger.run_views((), 1):
            raise _no_ledger(f"storage.{'postgres.url' if postgres else 'embedded.path'}: no coordinator ran here")
        before = known or place_of_old(settings.objects, settings.storage)
        count = await _check(ledger, store, place)
        if isinstance(store, OwnedStore):
            await settle(store, storage, key_of(settings.objects, settings.cloud), place, begins=True)
        if before == place:
            return f"the objects of this ledger are in {shown(place)} already, all {count} of them"
        await remember(storage, place)
        if state is not None:
            rewrite_cloud(state, settings.cloud)
    finally:
        for closing in (store.close, ledger.close, storage.close):
            await closing()
    return f"all {count} objects are there: from now on they are in {shown(place)}, not in {shown(before)}"


def _lock_of(storage: StorageSection) -> FileLock | None:
    """Return the lock that a coordinator on SQLite holds. Raises ConfigError if one does, or if there is no such
    database."""
    if storage.backend != "embedded":
        return None
    path = Path(storage.embedded.path).expanduser()
    if not path.exists():
        raise _no_ledger(f"storage.embedded.path: {path.absolute()} does not exist")
    lock = FileLock(file_lock_path(path))
    if not lock.try_acquire():
        raise ConfigError(f"storage.embedded.path: a coordinator runs on {path.absolute()}: {_STOP}")
    return lock


async def nobody_leads(ledger: Ledger, ttl_s: float) -> None:
    """Wait until the lease was released, or was not renewed for its TTL. Raises ConfigError if it was renewed."""
    found = row = await ledger.read_lease()
    clock = asyncio.get_running_loop().time
    until = clock() + ttl_s
    while row is not None and not row.released and clock() < until:
        await asyncio.sleep(min(0.5, ttl_s / 10))
        row = await ledger.read_lease()
        if row is not None and row != found and not row.released:
            raise ConfigError(f"storage.postgres.url: a coordinator leads there, at {row.address}: {_STOP}")


def _no_ledger(why: str) -> ConfigError:
    """Return the error for an empty ledger, which must not take the bucket from the ledger that it belongs to."""
    return ConfigError(
        f"{why}, so there is no ledger whose objects were moved: give the configuration of the coordinator that has "
        "it, in the directory where that is started"
    )


async def _check(ledger: Ledger, store: ObjectStore, place: str) -> int:
    seen: set[bytes] = set()
    for run in await ledger.run_views((), RUNS_MAX):
        seen |= await ledger.run_objects(run.spec.run_id)
    ids = sorted(seen)
    missing: list[bytes] = []
    for at in range(0, len(ids), _BATCH):
        part = ids[at : at + _BATCH]
        missing += [one for one, there in zip(part, await store.has(part), strict=True) if not there]
    if missing:
        named = ", ".join(one.hex() for one in missing[:_NAMED])
        raise ConfigError(
            f"{len(missing)} of {len(ids)} objects of this ledger are not in {shown(place)} ({named}"
            f"{', ...' if len(missing) > _NAMED else ''}): copy all of cas/ there first, keys as they are"
        )
    return len(ids)
