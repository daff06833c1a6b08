"""Key-value on SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from rollout.storage import kv
from rollout.storage.kv import ChangesPage, Check, GetCheck, KvStorage, Write
from rollout.storage.port import Change
from rollout.storage.sqlite import SqliteEngine

POLL_S = 1.0

_GET = "SELECT value FROM kv WHERE namespace = ? AND key = ?"
_PUT = "INSERT INTO kv (namespace, key, value) VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET value = excluded.value"
_DELETE = "DELETE FROM kv WHERE namespace = ? AND key = ?"
_IN_RANGE = "namespace = :namespace AND key >= :begin AND (:end IS NULL OR key < :end)"
_SCAN = f"SELECT key, value FROM kv WHERE {_IN_RANGE} ORDER BY key LIMIT :limit"
_CHANGES = f"""
SELECT namespace, key, value, revision FROM kv_change
 WHERE {_IN_RANGE} AND revision > :after AND revision <= :reached ORDER BY revision, idx
"""


class SqliteStorage(KvStorage):
    """`Storage` on one SQLite file, which a ledger may share."""

    def __init__(self, path: str | Path, *, max_pages: int | None = None, poll_s: float = POLL_S):
        self._engine = SqliteEngine(path, readers=2, max_pages=max_pages)
        super().__init__(_Backend(self._engine), poll_s)

    async def open(self) -> None:
        await self._engine.open()

    async def close(self) -> None:
        self.stop_watchers()
        await self._engine.close()


class _Backend:
    def __init__(self, engine: SqliteEngine):
        self._engine = engine

    async def get(self, namespace: str, key: str) -> bytes | None:
        return await self._engine.read(lambda db: _get(db, namespace, key))

    async def scan(self, namespace: str, prefix: str, limit: int | None) -> list[tuple[str, bytes]]:
        return await self._engine.read(lambda db: _scan(db, namespace, prefix, limit))

    async def apply(self, checks: Sequence[Check], writes: Sequence[Write]) -> list[Write] | None:
        return await self._engine.write(lambda db: _apply(db, checks, writes))

    async def revision(self) -> int:
        return await self._engine.read(_revision)

    async def changes(self, namespace: str, prefix: str, after: int) -> ChangesPage:
        return await self._engine.read(lambda db: _changes(db, namespace, prefix, after))


def _get(db: sqlite3.Connection, namespace: str, key: str) -> bytes | None:
    row = db.execute(_GET, (namespace, key)).fetchone()
    return None if row is None else row[0]


def _scan(db: sqlite3.Connection, namespace: str, prefix: str, limit: int | None) -> list[tuple[str, bytes]]:
    return db.execute(_SCAN, _range(namespace, prefix) | {"limit": -1 if limit is None else limit}).fetchall()


def _range(namespace: str, prefix: str) -> dict[str, str | int | None]:
    return {"namespace": namespace, "begin": prefix, "end": kv.upper_bound(prefix)}


def _revision(db: sqlite3.Connection) -> int:
    return db.execute(kv.READ_REVISION).fetchone()[0]


def _holds(db: sqlite3.Connection, check: Check) -> bool:
    if isinstance(check, GetCheck):
        return _get(db, check.namespace, check.key) == check.value
    return tuple(_scan(db, check.namespace, check.prefix, check.limit)) == check.found


def _apply(db: sqlite3.Connection, checks: Sequence[Check], writes: Sequence[Write]) -> list[Write] | None:
    if not all(_holds(db, check) for check in checks):
        return None
    done: list[Write] = []
    for namespace, key, value in writes:
        if value is None:
            changed = db.execute(_DELETE, (namespace, key)).rowcount > 0
        else:
            changed = db.execute(_PUT, (namespace, key, value)).rowcount > 0
        if changed:
            done.append((namespace, key, value))
    if done:
        revision = _revision(db) + 1
        db.execute("UPDATE kv_head SET revision = ? WHERE one = 1", (revision,))
        db.executemany(
            "INSERT INTO kv_change (revision, idx, namespace, key, value) VALUES (?, ?, ?, ?, ?)",
            [(revision, idx, *write) for idx, write in enumerate(done)],
        )
        if revision % kv.PRUNE_EVERY == 0:
            db.execute("DELETE FROM kv_change WHERE revision <= ?", (revision - kv.KEEP_REVISIONS,))
    return done


def _changes(db: sqlite3.Connection, namespace: str, prefix: str, after: int) -> ChangesPage:
    reached = max(after, min(_revision(db), after + kv.PAGE_REVISIONS))
    floor = db.execute("SELECT MIN(revision) FROM kv_change").fetchone()[0]
    bounds = _range(namespace, prefix) | {"after": after, "reached": reached}
    changes = [Change(*row) for row in db.execute(_CHANGES, bounds)] if reached > after else []
    return ChangesPage(changes, reached, floor)
