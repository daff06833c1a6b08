"""Holders of objects that the ledger does not refer to yet, in a small SQLite file beside the fs store."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from rollout.files import locked

_SCHEMA = """
CREATE TABLE IF NOT EXISTS pin (
  object_id BLOB NOT NULL, holder TEXT NOT NULL, expires_ms INTEGER NOT NULL, PRIMARY KEY (object_id, holder)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS pin_holder ON pin (holder);
"""


class PinTable:
    """Table of pins. Blocking; call it in a thread. Several processes may use one file at once."""

    def __init__(self, path: Path, *, shared: bool, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, timeout=30.0, isolation_level=None, check_same_thread=False)
        try:
            # Two that open at once collide on the change of the journal mode, for which SQLite does not wait.
            with locked(path.with_suffix(".lock")):
                # WAL needs shared memory, which a network file system does not give.
                self._db.execute(f"PRAGMA journal_mode={'DELETE' if shared else 'WAL'}")
                self._db.execute("PRAGMA synchronous=NORMAL")
                self._db.executescript(_SCHEMA)
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def exclusive(self) -> Generator[None]:
        """Exclude pinning and unpinning by any process."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def pin(self, object_ids: list[bytes], holder: str, ttl_s: float) -> None:
        with self.exclusive():
            self.add_pins(object_ids, holder, ttl_s)

    def add_pins(self, object_ids: list[bytes], holder: str, ttl_s: float) -> None:
        """Add pins. Call it within `exclusive`."""
        expires = self._now_ms() + int(ttl_s * 1000)
        self._db.executemany(
            "INSERT INTO pin VALUES (?, ?, ?)"
            " ON CONFLICT DO UPDATE SET expires_ms = max(expires_ms, excluded.expires_ms)",
            [(object_id, holder, expires) for object_id in object_ids],
        )

    def unpin(self, holder: str, object_ids: list[bytes] | None = None) -> None:
        """Remove all pins of `holder`, or those of `object_ids`."""
        with self.exclusive():
            if object_ids is None:
                self._db.execute("DELETE FROM pin WHERE holder = ? OR expires_ms <= ?", (holder, self._now_ms()))
                return
            rows = [(holder, object_id) for object_id in object_ids]
            self._db.executemany("DELETE FROM pin WHERE holder = ? AND object_id = ?", rows)

    def pinned(self, object_ids: list[bytes]) -> set[bytes]:
        with self._lock:
            return self._pinned(object_ids)

    def unless_pinned(self, object_id: bytes, act: Callable[[], bool]) -> bool:
        """Call `act` if nobody pins the object; no pin can come between the check and the call."""
        with self.exclusive():
            return False if self._pinned([object_id]) else act()

    def _pinned(self, object_ids: list[bytes]) -> set[bytes]:
        now = self._now_ms()
        held: set[bytes] = set()
        for start in range(0, len(object_ids), 500):
            part = object_ids[start : start + 500]
            marks = ",".join("?" * len(part))
            rows = self._db.execute(
                f"SELECT DISTINCT object_id FROM pin WHERE expires_ms > ? AND object_id IN ({marks})", (now, *part)
            )
            held.update(row[0] for row in rows)
        return held
