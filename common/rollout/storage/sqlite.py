"""The SQLite engine: WAL, synchronous=FULL, one writer thread, and readers on connections of their own.

A whole batch takes one hop to the writer thread. Readers and the writer never block each other.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
from collections.abc import Callable, Generator
from contextlib import AsyncExitStack, contextmanager
from operator import itemgetter
from pathlib import Path
from typing import TypeVar

import aiosqlite
from tenacity import retry, retry_if_exception, stop_after_delay, wait_random

from rollout.model.errors import (
    ConfigError,
    ConflictError,
    StorageDamagedError,
    StorageError,
    StorageFaultError,
    StorageFullError,
    StorageUnavailableError,
)
from rollout.storage import disk, migrations

T = TypeVar("T")

# The module looks for an adapter of every parameter that is not exactly int, float, str or bytearray, at several times
# the cost of binding it; one that gives the value back ends the search at once.
sqlite3.register_adapter(bytes, itemgetter(slice(None)))

PATH_MAX = 504
"""Maximum bytes of a path in SQLite, including the suffixes of its other files."""
READERS = 3
BUSY_TIMEOUT_MS = 5_000


def translate(error: sqlite3.Error, where: str) -> StorageError | ConflictError:
    """Return the typed error of a failure while running; `open` makes ConfigErrors of its own."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return _full(where)
    if code == sqlite3.SQLITE_CONSTRAINT:
        return ConflictError(f"a row is already in {where}: {error}")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StorageUnavailableError(
            f"{where} stays locked by another program ({error}): close it, e.g. a sqlite3 shell"
        )
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return StorageError(f"{where} is damaged ({error}): restore it from a backup")
    if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return _disk_fault(error, where)
    return StorageError(f"{where}: {error}")


def _full(where: str) -> StorageFullError:
    return StorageFullError(
        f"the disk that holds {where} is full: nothing of this transaction was written and nothing acknowledged "
        "is lost; free some space and start again"
    )


def _disk_fault(error: sqlite3.Error, where: str) -> StorageError:
    fault = disk.fault_of(Path(where))
    if fault is not None and fault.errno in disk.FULL:
        return _full(where)
    said = f"{getattr(error, 'sqlite_errorname', type(error).__name__)}, {error}"
    text = f"cannot read or write {where}: {disk.in_words(fault, said)}; nothing acknowledged is lost"
    if fault is not None and fault.errno in disk.OUT_OF_FILES:
        return StorageUnavailableError(text)  # passes when others close theirs
    return StorageFaultError(text)


@contextmanager
def transaction(connection: sqlite3.Connection, begin: str = "BEGIN IMMEDIATE") -> Generator[sqlite3.Connection]:
    """Commit on a clean exit; roll back on an exception, including one of COMMIT itself."""
    connection.execute(begin)
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        # SQLite has already rolled back by itself after some errors, e.g. SQLITE_FULL.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


class _Connection(aiosqlite.Connection):
    """A connection whose thread executes a whole transaction in one hop: aiosqlite's own calls take one a statement."""

    def __init__(self, opened: sqlite3.Connection):
        super().__init__(lambda: opened, iter_chunk_size=1)
        self._thread.daemon = True  # a program that fails before `close` ends
        self._opened = opened

    async def run(self, work: Callable[[sqlite3.Connection], T], begin: str) -> T:
        return await self._execute(_in_transaction, self._opened, work, begin)  # pyright: ignore[reportUnknownMemberType]


def _in_transaction(connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], T], begin: str) -> T:
    with transaction(connection, begin):
        return work(connection)


class SqliteEngine:
    """Connections to one database file, each with a thread. `max_pages` limits the file, for tests of a full disk."""

    def __init__(self, path: str | Path, *, readers: int = READERS, max_pages: int | None = None):
        self.path = Path(path).expanduser()
        self._max_pages = max_pages
        self._readers = readers
        self._writer: _Connection | None = None

    async def open(self) -> None:
        """Create the directory, connect, migrate. Raises ConfigError for a path that cannot hold a database."""
        if self._writer is not None:
            return
        self._idle: asyncio.Queue[_Connection] = asyncio.Queue()
        async with AsyncExitStack() as opening:
            writer = _Connection(await asyncio.to_thread(self._open_writer))
            await opening.enter_async_context(writer)
            for _ in range(self._readers):
                reader = _Connection(await asyncio.to_thread(self._open_reader))
                await opening.enter_async_context(reader)
                self._idle.put_nowait(reader)
            self._connections = opening.pop_all()
        self._writer = writer

    async def close(self) -> None:
        """Wait for requested work, then close. Safe to call twice."""
        if self._writer is not None:
            self._writer = None
            for _ in range(self._readers):
                await self._idle.get()
            await self._connections.aclose()

    async def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in one transaction on the writer thread: one hop, one fsync."""
        try:
            return await self._opened().run(work, "BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            raise translate(error, str(self.path)) from error

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` on a reader thread, in one read transaction (one consistent view)."""
        self._opened()
        reader = await self._idle.get()
        try:
            return await reader.run(work, "BEGIN")
        except sqlite3.Error as error:
            raise translate(error, str(self.path)) from error
        except (ValueError, KeyError, TypeError, IndexError) as error:  # of what decodes the rows
            raise StorageDamagedError(
                f"{self.path}: a row cannot be read ({type(error).__name__}: {error}): the database is "
                "damaged, restore it from a backup"
            ) from error
        finally:
            self._idle.put_nowait(reader)

    def _opened(self) -> _Connection:
        if self._writer is None:
            raise StorageUnavailableError(f"{self.path} is not open")
        return self._writer

    def _connect(self, *pragmas: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
            timeout=BUSY_TIMEOUT_MS / 1e3,
        )
        try:
            # The cache, in KiB: a coordinator's memory grows by it over a run; the system's own cache stands behind it.
            for pragma in ("synchronous=FULL", "temp_store=MEMORY", "cache_size=-8192", *pragmas):
                connection.execute(f"PRAGMA {pragma}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _open_reader(self) -> sqlite3.Connection:
        try:
            # What it has cached is dropped at the next commit of the writer.
            return self._connect("query_only=ON", "cache_size=-2048")
        except sqlite3.Error as error:
            raise _unusable(self.path, error) from error

    def _open_writer(self) -> sqlite3.Connection:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = self._connect()
        except (OSError, sqlite3.Error) as error:
            raise _unusable(self.path, error) from error
        try:
            _use_wal(connection)
            # FULL syncs every commit; the WAL is folded back at 16 MiB so that it stays short.
            connection.execute("PRAGMA wal_autocheckpoint=4096")
            self._migrate(connection)
            if self._max_pages is not None:
                connection.execute(f"PRAGMA max_page_count={self._max_pages}")
        except sqlite3.Error as error:
            connection.close()
            raise _unusable(self.path, error) from error
        except BaseException:
            connection.close()
            raise
        return connection

    def _migrate(self, connection: sqlite3.Connection) -> None:
        with transaction(connection):
            connection.execute(migrations.VERSION_TABLE)
            stored = connection.execute(migrations.READ_VERSION).fetchone()[0]
            for statement in migrations.plan(stored, "sqlite", str(self.path)):
                connection.execute(statement)


@retry(
    retry=retry_if_exception(lambda e: getattr(e, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY),
    stop=stop_after_delay(BUSY_TIMEOUT_MS / 1000),
    wait=wait_random(0.01, 0.05),
    reraise=True,
)
def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch to WAL, with retries: several programs may open a new file at once, and this statement ignores the busy
    timeout."""
    connection.execute("PRAGMA journal_mode=WAL").fetchall()


def _unusable(path: Path, error: OSError | sqlite3.Error) -> ConfigError | StorageError | ConflictError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return StorageFullError(f"the disk that is to hold {path} is full: free some space and start again")
    if code == sqlite3.SQLITE_NOTADB:
        return ConfigError(f"{path} is not a SQLite database: point [storage.embedded] path at another file")
    if code == sqlite3.SQLITE_CORRUPT:
        return ConfigError(f"{path} is damaged ({error}): restore it from a backup or choose another path")
    if code == sqlite3.SQLITE_CANTOPEN and (length := len(os.fsencode(path.absolute()))) > PATH_MAX:
        return ConfigError(
            f"{path} cannot be a database: its path has {length} bytes, SQLite takes {PATH_MAX}; choose a directory "
            "nearer the root of the file system"
        )
    if isinstance(error, OSError) or code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return ConfigError(
            f"cannot open {path} for writing ({error}): check [storage.embedded] path and its permissions"
        )
    assert isinstance(error, sqlite3.Error)
    return translate(error, str(path))
