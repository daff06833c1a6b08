"""Opens the pins of a bucket's objects, which live in the ledger's database or beside its file."""

from __future__ import annotations

from pathlib import Path

from rollout.config.settings import StorageSection
from rollout.model.errors import ConfigError
from rollout.objects.claims import FilePins, Pins
from rollout.objects.postgres_pins import PostgresPins


def ledger_pins(storage: StorageSection) -> Pins:
    """Return the pins, not opened yet. Raises ConfigError."""
    if storage.backend != "postgres":
        return FilePins(Path(storage.embedded.path).with_name("object-pins.db"))
    if not storage.postgres.url:
        raise ConfigError('[storage] backend = "postgres" needs [storage.postgres] url')
    return PostgresPins(storage.postgres.url, pool_size=storage.postgres.pool_size)
