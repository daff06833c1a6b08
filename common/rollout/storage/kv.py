"""Shared parts of the key-value adapters: transactions that validate what they read, and watchers of the revision log.

Every commit that changes something gets the next revision and leaves its changes in `kv_change`. Watchers read that
log, so they see only commits, in commit order; waking them early is an optimisation.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from rollout.model.errors import (
    InputError,
    NotFoundError,
    StateError,
    StorageUnavailableError,
    TransactionConflictError,
)
from rollout.storage.port import Change, Transaction

KEEP_REVISIONS = 10_000
"""Number of revisions kept for watchers."""

PRUNE_EVERY = 256
PAGE_REVISIONS = 1_000

READ_REVISION = "SELECT revision FROM kv_head WHERE one = 1"


@dataclass(frozen=True, slots=True)
class GetCheck:
    """At commit the key must still have this value."""

    namespace: str
    key: str
    value: bytes | None


@dataclass(frozen=True, slots=True)
class ScanCheck:
    """At commit the scan must still return this."""

    namespace: str
    prefix: str
    limit: int | None
    found: tuple[tuple[str, bytes], ...]


Check = GetCheck | ScanCheck
Write = tuple[str, str, bytes | None]


@dataclass(frozen=True, slots=True)
class ChangesPage:
    """Changes after a revision, up to `reached`; `floor` is the oldest revision still kept, or None."""

    changes: list[Change]
    reached: int
    floor: int | None


def check_key(namespace: str, key: str) -> None:
    """Raise InputError for names that not both databases support."""
    for name, text in (("namespace", namespace), ("key", key)):
        if "\x00" in text or (not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text)):
            raise InputError(f"a {name} must be Unicode text without NUL and lone surrogates, got {text!r}")


def upper_bound(prefix: str) -> str | None:
    """Return the smallest text, by UTF-8 bytes, above every text with this prefix, or None if there is none.

    UTF-8 bytes sort like code points, so the last character is incremented, skipping surrogates.
    """
    for end in range(len(prefix), 0, -1):
        point = ord(prefix[end - 1])
        if point < 0x10FFFF:
            return prefix[: end - 1] + chr(0xE000 if point == 0xD7FF else point + 1)
    return None


class Backend(Protocol):
    """What an adapter does in the database; each call is one transaction."""

    async def get(self, namespace: str, key: str) -> bytes | None: ...
    async def scan(self, namespace: str, prefix: str, limit: int | None) -> list[tuple[str, bytes]]: ...

    async def apply(self, checks: Sequence[Check], writes: Sequence[Write]) -> list[Write] | None:
        """Return the writes that had an effect (all except deletions of absent keys), or None if a check failed and
        nothing was written."""
        ...

    async def revision(self) -> int: ...
    async def changes(self, namespace: str, prefix: str, after: int) -> ChangesPage: ...


class KvStorage:
    """`Storage` over a backend. `poll_s` bounds the delay until a watcher sees another process's commit."""

    def __init__(self, backend: Backend, poll_s: float):
        self._backend = backend
        self._poll_s = poll_s
        self._turn = asyncio.Lock()
        self._watchers: set[asyncio.Event] = set()
        self._closed = False

    async def get(self, namespace: str, key: str) -> bytes | None:
        check_key(namespace, key)
        return await self._backend.get(namespace, key)

    async def put(self, namespace: str, key: str, value: bytes) -> None:
        check_key(namespace, key)
        await self._apply([], [(namespace, key, value)])

    async def delete(self, namespace: str, key: str) -> bool:
        check_key(namespace, key)
        return bool(await self._apply([], [(namespace, key, None)]))

    async def cas(self, namespace: str, key: str, expected: bytes | None, value: bytes | None) -> bool:
        check_key(namespace, key)
        return await self._apply([GetCheck(namespace, key, expected)], [(namespace, key, value)]) is not None

    async def scan(self, namespace: str, prefix: str = "", limit: int | None = None) -> list[tuple[str, bytes]]:
        check_key(namespace, prefix)
        return await self._backend.scan(namespace, prefix, limit)

    async def revision(self) -> int:
        return await self._backend.revision()

    async def ping(self) -> None:
        """Raise StorageUnavailableError if the database does not answer."""
        await self.revision()

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        return self._transaction()

    @asynccontextmanager
    async def _transaction(self) -> AsyncGenerator[Transaction]:
        async with self._turn:
            buffered = BufferedTransaction(self._backend)
            try:
                yield buffered
            finally:
                buffered.finished = True
            writes = [(*place, value) for place, value in buffered.writes.items()]
            # One read alone is consistent by itself; everything else is checked again where it commits.
            needed = bool(writes) or len(buffered.checks) > 1
            if needed and await self._apply(buffered.checks, writes) is None:
                raise TransactionConflictError

    async def _apply(self, checks: Sequence[Check], writes: Sequence[Write]) -> list[Write] | None:
        done = await self._backend.apply(checks, writes)
        if done:
            self.wake()
            await self.announce()
        return done

    async def announce(self) -> None:
        """Tell other processes that there are changes; may do nothing."""

    def wake(self) -> None:
        """Make every watcher read the log now."""
        for event in self._watchers:
            event.set()

    def stop_watchers(self) -> None:
        self._closed = True
        self.wake()

    async def watch(self, namespace: str, prefix: str = "", after: int | None = None) -> AsyncIterator[Change]:
        check_key(namespace, prefix)
        event = asyncio.Event()
        self._watchers.add(event)
        try:
            reached = await self._backend.revision() if after is None else after
            while not self._closed:
                event.clear()
                try:
                    page = await self._backend.changes(namespace, prefix, reached)
                except StorageUnavailableError:
                    # The log is still there when the database is back; nothing is missed.
                    page = ChangesPage([], reached, None)
                if page.reached > reached and (page.floor is None or reached + 1 < page.floor):
                    raise NotFoundError(
                        f"the changes after revision {reached} are no longer kept (the oldest is {page.floor}): "
                        "scan again and watch from the current revision"
                    )
                for change in page.changes:
                    yield change
                if page.reached > reached:
                    reached = page.reached
                    continue
                if self._closed:
                    return
                with suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), self._poll_s)
        finally:
            self._watchers.discard(event)


class BufferedTransaction:
    """Reads from the database, remembers what it saw, and buffers its writes until the end."""

    def __init__(self, backend: Backend):
        self._backend = backend
        self.checks: list[Check] = []
        self.writes: dict[tuple[str, str], bytes | None] = {}
        self.finished = False

    def _use(self, namespace: str, key: str) -> None:
        if self.finished:
            raise StateError("this transaction has ended: use it only inside its `async with`")
        check_key(namespace, key)

    async def get(self, namespace: str, key: str) -> bytes | None:
        self._use(namespace, key)
        if (namespace, key) in self.writes:
            return self.writes[namespace, key]
        value = await self._backend.get(namespace, key)
        self.checks.append(GetCheck(namespace, key, value))
        return value

    async def put(self, namespace: str, key: str, value: bytes) -> None:
        self._use(namespace, key)
        self.writes[namespace, key] = value

    async def delete(self, namespace: str, key: str) -> bool:
        present = await self.get(namespace, key) is not None
        if present:
            self.writes[namespace, key] = None
        return present

    async def cas(self, namespace: str, key: str, expected: bytes | None, value: bytes | None) -> bool:
        if await self.get(namespace, key) != expected:
            return False
        self.writes[namespace, key] = value
        return True

    async def scan(self, namespace: str, prefix: str = "", limit: int | None = None) -> list[tuple[str, bytes]]:
        self._use(namespace, prefix)
        mine = {
            key: value for (space, key), value in self.writes.items() if space == namespace and key.startswith(prefix)
        }
        # Rows of mine may hide or replace stored ones, so ask for as many more.
        wide = None if limit is None else limit + len(mine)
        found = await self._backend.scan(namespace, prefix, wide)
        self.checks.append(ScanCheck(namespace, prefix, wide, tuple(found)))
        merged: dict[str, bytes | None] = {**dict(found), **mine}
        rows = [(key, value) for key, value in merged.items() if value is not None]
        rows.sort(key=lambda row: row[0].encode())
        return rows[:limit]
