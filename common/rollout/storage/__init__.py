"""A namespaced key-value store with transactions and watch, and the engines and schema that the ledger shares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.storage.port import Change, Storage, Transaction

if TYPE_CHECKING:
    from rollout.config.settings import StorageSection

__all__ = ["Change", "Storage", "Transaction", "open_storage"]


def open_storage(section: StorageSection) -> Storage:
    """Return the key-value store of `[storage]`; call `open()` before use."""
    if section.backend == "postgres":
        from rollout.storage.kv_postgres import PostgresStorage

        return PostgresStorage(
            section.postgres.url,
            direct_url=section.postgres.direct_url,
            pool_size=max(2, section.postgres.pool_size // 2),
        )
    from rollout.storage.kv_sqlite import SqliteStorage

    return SqliteStorage(section.embedded.path)
