"""A namespaced key-value store with compare-and-swap, transactions, prefix scan and watch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Change:
    """A committed change. `value` is None if it was deleted. `revision` grows with every commit."""

    namespace: str
    key: str
    value: bytes | None
    revision: int


class Transaction(Protocol):
    async def get(self, namespace: str, key: str) -> bytes | None: ...
    async def put(self, namespace: str, key: str, value: bytes) -> None: ...
    async def delete(self, namespace: str, key: str) -> bool: ...

    async def cas(self, namespace: str, key: str, expected: bytes | None, value: bytes | None) -> bool:
        """Swap if the stored bytes equal `expected` (None: absent), and return whether they did; `value` None
        deletes."""
        ...

    async def scan(self, namespace: str, prefix: str = "", limit: int | None = None) -> list[tuple[str, bytes]]:
        """Return entries in byte order of the key."""
        ...


class Storage(Transaction, Protocol):
    """A store. Each call on it is a transaction of its own."""

    async def open(self) -> None: ...
    async def close(self) -> None: ...
    async def ping(self) -> None: ...

    async def revision(self) -> int:
        """Return the revision of the newest commit. Read it, scan, then `watch(after=it)`, to miss no change."""
        ...

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """Run a serializable transaction, which commits on a clean exit and rolls back on an exception.

        It holds no database lock: at the end it raises TransactionConflictError if another process changed what was
        read. Transactions of one process wait for each other instead, so keep them short and do not nest them.
        """
        ...

    def watch(self, namespace: str, prefix: str = "", after: int | None = None) -> AsyncIterator[Change]:
        """Yield changes after commit, never of a rolled-back transaction, of every process on the same database.

        It waits while the database is unavailable. `after` None starts with the first iteration. Raises NotFoundError
        if the changes after `after` are no longer kept.
        """
        ...
