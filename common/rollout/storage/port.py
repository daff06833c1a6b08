"""Namespaced key-value with compare-and-swap, transactions, prefix scan and watch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Change:
    """A committed change. `value` None: deleted. `revision` grows with every commit."""

    namespace: str
    key: str
    value: bytes | None
    revision: int


class Transaction(Protocol):
    async def get(self, namespace: str, key: str) -> bytes | None: ...
    async def put(self, namespace: str, key: str, value: bytes) -> None: ...
    async def delete(self, namespace: str, key: str) -> bool: ...

    async def cas(self, namespace: str, key: str, expected: bytes | None, value: bytes | None) -> bool:
        """Swap iff the stored bytes equal `expected` (None: absent); `value` None deletes."""
        ...

    async def scan(self, namespace: str, prefix: str = "", limit: int | None = None) -> list[tuple[str, bytes]]:
        """In byte order of the key."""
        ...


class Storage(Transaction, Protocol):
    """Each call on the storage itself is a transaction of its own."""

    async def open(self) -> None: ...
    async def close(self) -> None: ...
    async def ping(self) -> None: ...

    async def revision(self) -> int:
        """Of the newest commit. Read it, scan, then `watch(after=it)`: no change is missed."""
        ...

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """Commits on a clean exit, rolls back on an exception. Serializable.

        No database lock is held meanwhile: TransactionConflictError at the end when another process changed what was
        read. Transactions of one process wait for each other instead, so keep them short and do not nest them.
        """
        ...

    def watch(self, namespace: str, prefix: str = "", after: int | None = None) -> AsyncIterator[Change]:
        """Changes after commit, never of a rolled-back transaction; of every process on the same database.

        Waits through a database that goes away and returns. `after` None: from the first iteration on.
        NotFoundError when the changes after `after` are no longer kept.
        """
        ...
