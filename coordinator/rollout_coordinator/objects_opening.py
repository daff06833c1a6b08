"""Opens the object store, reports at once if it does not respond, and refuses one of another ledger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager

import structlog
from rollout.cloud.installed import check_installed
from rollout.config.settings import CoordinatorSettings
from rollout.model.errors import ConfigError
from rollout.objects.opening import backend_name
from rollout.objects.place import elsewhere, key_of, place_of, place_of_old, remembered, replace_remembered, settle
from rollout.objects.port import ObjectStore, OwnedStore
from rollout.storage.port import Storage

log = structlog.get_logger()

TELL_AFTER_S = 1.0
_TELL_EVERY_S = 15.0
_CREDENTIALS = ("the default chain", "gcloud auth", "aws sso login", "AWS_PROFILE")
"""Phrases in remedies about credentials."""
_BUCKETS = {"s3": "cloud.s3.bucket", "gcs": "cloud.gcs.bucket"}


async def open_objects(
    store: ObjectStore, storage: Storage, settings: CoordinatorSettings, has_runs: Callable[[], Awaitable[bool]]
) -> None:
    """Open `store` once `storage` is open. Raises ConfigError, beginning with a key, if the ledger's objects are
    elsewhere, if another ledger's are there, or if there is no such bucket, no permission and so on."""
    check_installed(settings.cloud)
    place = place_of(settings.objects, settings.storage, settings.cloud)
    known = await remembered(storage)
    used = known != place and await has_runs()
    before = place_of_old(settings.objects, settings.storage) if used and not known else known
    # Without runs a person who changes their mind may: but not where another coordinator may be writing to the first.
    if before not in ("", place) and (used or settings.storage.backend == "postgres"):
        raise elsewhere(key_of(settings.objects, settings.cloud), before, place)
    key = _BUCKETS.get(backend_name(settings.objects, settings.storage, settings.cloud))
    if key is None:
        await store.open()
    else:
        async with _told(place, settings.cloud.endpoint_of_objects):
            with _keyed(key):
                await store.open()
                try:
                    await _settle(store, storage, settings, place, has_runs)
                except BaseException:
                    await store.close()
                    raise
    if known != place and (now := await replace_remembered(storage, known, place)) != place:
        raise elsewhere(key_of(settings.objects, settings.cloud), now, place)


async def _settle(
    store: ObjectStore,
    storage: Storage,
    settings: CoordinatorSettings,
    place: str,
    has_runs: Callable[[], Awaitable[bool]],
) -> None:
    if isinstance(store, OwnedStore):
        key = key_of(settings.objects, settings.cloud).replace("bucket", "prefix")
        await settle(store, storage, key, place, begins=not await has_runs())


@contextmanager
def _keyed(key: str) -> Generator[None]:
    """Make a ConfigError begin with the key that it concerns, by default `key`."""
    try:
        yield
    except ConfigError as error:
        if not error.message.startswith("cloud."):
            error.message = f"{_key_of(error.message, key)}: {error.message}"
        raise


def _key_of(message: str, bucket: str) -> str:
    if "set [cloud] region" in message:
        return "cloud.region"
    return "cloud.provider" if any(words in message for words in _CREDENTIALS) else bucket


@asynccontextmanager
async def _told(place: str, endpoint: str) -> AsyncGenerator[None]:
    """Tell the user while the service is retried, which takes a minute."""
    telling = asyncio.create_task(_tell(place, endpoint))
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


async def _tell(place: str, endpoint: str) -> None:
    waited, pause = 0.0, TELL_AFTER_S
    while True:
        await asyncio.sleep(pause)
        waited, pause = waited + pause, _TELL_EVERY_S
        log.warning("objects_unreachable", place=place, endpoint=endpoint, waited_s=round(waited))
