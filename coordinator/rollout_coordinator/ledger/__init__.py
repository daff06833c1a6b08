"""The durable table of runs, items, attempts and results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout_coordinator.ledger.ledger import Ledger
from rollout_coordinator.ledger.port import CommitPage, Fence, LeaseRow

if TYPE_CHECKING:
    from rollout.config.settings import StorageSection

__all__ = ["CommitPage", "Fence", "LeaseRow", "Ledger", "open_ledger"]


def open_ledger(section: StorageSection, *, ttl: float = 5.0) -> Ledger:
    """Return the ledger of `[storage]`; call `open()` before use.

    `ttl` is the lease's (coordinator_failure_timeout, seconds): on PostgreSQL it limits every transaction.
    """
    if section.backend == "postgres":
        from rollout_coordinator.ledger.postgres import PostgresLedger

        return PostgresLedger(section.postgres.url, pool_size=section.postgres.pool_size, ttl=ttl)
    from rollout_coordinator.ledger.sqlite import SqliteLedger

    return SqliteLedger(section.embedded.path)
