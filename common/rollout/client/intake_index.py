"""An index of the messages that a run has taken: message to seq, in SQLite, as a copy of what the ledger has; and the
receipts of those that are not deleted from the queue yet.

The id of an item begins with a hash of its message's id and one of its body (`Identity`), so that this file can be lost
at any time: whatever it lacks is read from the ledger again. That bounds memory, whatever the length of a run. Receipts
are nowhere else. Without them a command waits for the leases of an earlier one to end.
"""

from __future__ import annotations

import shutil
import sqlite3
import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from rollout.model.errors import StorageError, StorageFullError

NAME = ".intake.db"
KEY, BODY, WHAT = 12, 10, 10
"""Bytes of an item's id: hash of the message's id, of its body, and of what the item does."""

_FULL = frozenset({sqlite3.SQLITE_FULL})
_REFUSED = frozenset(
    {
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
    }
)
_KEYS_AT_ONCE = 500


class IndexDamagedError(Exception):
    """The file held something else and was recreated empty: read the ledger."""


def key_of(message_id: str) -> bytes:
    return blake3(b"message" + message_id.encode("utf-8", "surrogatepass")).digest(KEY)


def conflict_key_of(message_id: str, body: bytes) -> bytes:
    """Return the key of a message whose id was seen before with another body."""
    return blake3(b"conflict" + key_of(message_id) + body).digest(KEY)


def body_of(body: bytes) -> bytes:
    return blake3(body).digest(BODY)


def item_id(key: bytes, body: bytes, what: bytes) -> bytes:
    """Return an item's id. `what` is the workload's id for what the item does."""
    return key + body + blake3(what).digest(WHAT)


@dataclass(frozen=True, slots=True)
class Taken:
    """A message that is in the ledger, at `seq`, with `key` and `body` as above."""

    key: bytes
    body: bytes
    seq: int

    @classmethod
    def of(cls, seq: int, identity: bytes) -> Taken:
        return cls(identity[:KEY], identity[KEY : KEY + BODY], seq)


class Receipt(NamedTuple):
    """A delivery of the message `id`, whose hash is `key`, that may not be deleted yet."""

    key: bytes
    id: str
    receipt: str


class TakenIndex:
    """Call `open` first and `close` always. All calls block, and raise IndexDamagedError, StorageFullError or
    StorageError.

    It knows every seq below `count`.
    """

    def __init__(self, path: Path, run_id: str) -> None:
        self._path = path
        self._run_id = run_id
        self._db: sqlite3.Connection | None = None
        self._one = threading.Lock()
        self.count = 0

    def open(self) -> None:
        """Open the file. One of another run, or of another program, is recreated."""
        try:
            self._open()
        except IndexDamagedError:
            self._open()

    def _open(self) -> None:
        with self._one:
            try:
                db = self._db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
                db.execute("PRAGMA journal_mode = WAL")
                db.execute("PRAGMA synchronous = NORMAL")
                db.execute("CREATE TABLE IF NOT EXISTS run (id TEXT, count INTEGER)")
                db.execute(
                    "CREATE TABLE IF NOT EXISTS taken (key BLOB PRIMARY KEY, body BLOB, seq INTEGER) WITHOUT ROWID"
                )
                db.execute(
                    "CREATE TABLE IF NOT EXISTS receipt (key BLOB PRIMARY KEY, id TEXT, receipt TEXT) WITHOUT ROWID"
                )
                row = db.execute("SELECT id, count FROM run").fetchone()
                if row is None:
                    db.execute("INSERT INTO run VALUES (?, 0)", (self._run_id,))
                elif row[0] != self._run_id or not isinstance(row[1], int):
                    raise sqlite3.DatabaseError("it is another run's")
                self.count = row[1] if row else 0
            except sqlite3.Error as error:
                raise self._failed(error) from error

    def find(self, keys: Iterable[bytes]) -> dict[bytes, Taken]:
        """Return those of them that were taken."""
        wanted = list(keys)
        found: dict[bytes, Taken] = {}
        with self._reading() as db:
            for start in range(0, len(wanted), _KEYS_AT_ONCE):
                part = wanted[start : start + _KEYS_AT_ONCE]
                marks = ",".join("?" * len(part))
                rows = db.execute(f"SELECT key, body, seq FROM taken WHERE key IN ({marks})", part)
                found |= {key: Taken(key, body, seq) for key, body, seq in rows}
        return found

    def add(self, taken: Sequence[Taken], count: int) -> None:
        """Add messages; every seq below `count` is then known. Repeating it is harmless."""
        rows = [(one.key, one.body, one.seq) for one in taken]
        with self._changing() as db:
            db.executemany("INSERT OR IGNORE INTO taken VALUES (?, ?, ?)", rows)
            db.execute("UPDATE run SET count = max(count, ?)", (count,))
        self.count = max(self.count, count)

    def hold(self, receipts: Sequence[Receipt]) -> None:
        """Remember deliveries until `release`. A later delivery replaces an earlier one."""
        with self._changing() as db:
            db.executemany("INSERT OR REPLACE INTO receipt VALUES (?, ?, ?)", receipts)

    def release(self, receipts: Sequence[Receipt], *, taken: bool = True) -> None:
        """Forget deliveries of deleted messages; with `taken`, only of those known to be taken, because otherwise
        nobody would know that they were deleted."""
        known = " AND key IN (SELECT key FROM taken)" if taken else ""
        with self._changing() as db:
            db.executemany(f"DELETE FROM receipt WHERE key = ? AND id = ? AND receipt = ?{known}", receipts)

    def receipts(self) -> list[Receipt]:
        """Return all held receipts."""
        with self._reading() as db:
            return [Receipt(*row) for row in db.execute("SELECT key, id, receipt FROM receipt")]

    def clear(self) -> None:
        """Forget all messages."""
        with self._changing() as db:
            db.execute("DELETE FROM taken")
            db.execute("UPDATE run SET count = 0")
        self.count = 0

    @contextmanager
    def _reading(self) -> Generator[sqlite3.Connection]:
        with self._one:
            try:
                yield self._connection()
            except sqlite3.Error as error:
                raise self._failed(error) from error

    @contextmanager
    def _changing(self) -> Generator[sqlite3.Connection]:
        with self._reading() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    def close(self) -> None:
        with self._one:
            self._close()

    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            raise sqlite3.DatabaseError("it is closed")
        return self._db

    def _close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def _failed(self, error: sqlite3.Error) -> Exception:
        """Return what to raise in its place. A file that holds something else is deleted."""
        code = (getattr(error, "sqlite_errorcode", None) or sqlite3.SQLITE_CORRUPT) & 0xFF
        if code in _FULL:
            return StorageFullError(
                f"no space left while writing {self._path}: what was taken so far is safe; free some space and run the "
                "same command again"
            )
        if code in _REFUSED and not self._path.is_dir():
            return StorageError(f"cannot write {self._path}: {error}: check the rights of its directory and the disk")
        self._close()
        self.count = 0
        try:
            for path in (self._path, *(self._path.with_name(self._path.name + end) for end in ("-wal", "-shm"))):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        except OSError as refused:
            return StorageError(f"{self._path} is damaged and cannot be deleted: {refused.strerror or refused}")
        return IndexDamagedError(f"{self._path} was damaged ({error})")
