"""Reads the ledger from outside: sqlite3 or asyncpg and plain SQL, none of the engine's code."""

from __future__ import annotations

import asyncio
import sqlite3
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import asyncpg

Row = Sequence[Any]


class AwayError(Exception):
    """The database does not answer at present."""


class Reader(Protocol):
    """`rows` reads several queries in one snapshot. AwayError."""

    async def rows(self, *queries: str) -> list[list[Row]]: ...
    async def execute(self, *statements: str) -> None: ...
    async def close(self) -> None: ...


class SqliteReader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._lock = asyncio.Lock()

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = sqlite3.connect(self._path, timeout=30, isolation_level=None, check_same_thread=False)
        return self._connection

    def _read(self, queries: Sequence[str]) -> list[list[Row]]:
        connection = self._open()
        connection.execute("BEGIN")
        try:
            return [connection.execute(query).fetchall() for query in queries]
        finally:
            connection.execute("COMMIT")

    def _write(self, statements: Sequence[str]) -> None:
        connection = self._open()
        connection.execute("BEGIN IMMEDIATE")
        for statement in statements:
            connection.execute(statement)
        connection.execute("COMMIT")

    async def rows(self, *queries: str) -> list[list[Row]]:
        async with self._lock:
            return await asyncio.to_thread(self._read, queries)

    async def execute(self, *statements: str) -> None:
        async with self._lock:
            await asyncio.to_thread(self._write, statements)

    async def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


# The last is what asyncpg says of a connection that broke while it was being told so.
_AWAY = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)


class PostgresReader:
    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: asyncpg.Connection | None = None
        self._lock = asyncio.Lock()

    async def _open(self) -> asyncpg.Connection:
        connection = self._connection
        if connection is None or connection.is_closed():
            connection = self._connection = await asyncpg.connect(self._url, timeout=5, command_timeout=30)
        return connection

    async def rows(self, *queries: str) -> list[list[Row]]:
        async with self._lock:
            try:
                connection = await self._open()
                async with connection.transaction(isolation="repeatable_read", readonly=True):
                    return [[tuple(row) for row in await connection.fetch(query)] for query in queries]
            except _AWAY as error:
                await self._drop()
                raise AwayError(str(error)) from error

    async def execute(self, *statements: str) -> None:
        async with self._lock:
            connection = await self._open()
            async with connection.transaction():
                for statement in statements:
                    await connection.execute(statement)

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(OSError, asyncpg.InterfaceError):
                connection.terminate()

    async def close(self) -> None:
        await self._drop()


# ---- assignment.keys: groups of <log u64, n u32, seqs u8, attempts u8>, little-endian, each followed by
# the seqs (0: the first of a contiguous range, 1: n of u64) and the attempts (0: one u64 for all, 1: n bytes, 2: n of u64)

_GROUP = struct.Struct("<QIBB")
Key = tuple[int, int, int]
"""(log, seq, attempt)"""


def unpack_keys(packed: bytes) -> list[Key]:
    found: list[Key] = []
    at = 0
    while at < len(packed):
        log, n, seqs_as, attempts_as = _GROUP.unpack_from(packed, at)
        at += _GROUP.size
        if seqs_as == 0:
            (first,) = struct.unpack_from("<Q", packed, at)
            seqs: Iterable[int] = range(first, first + n)
            at += 8
        else:
            seqs = struct.unpack_from(f"<{n}Q", packed, at)
            at += 8 * n
        if attempts_as == 0:
            attempts: Sequence[int] = struct.unpack_from("<Q", packed, at) * n
            at += 8
        elif attempts_as == 1:
            attempts = packed[at : at + n]
            at += n
        else:
            attempts = struct.unpack_from(f"<{n}Q", packed, at)
            at += 8 * n
        found += [(log, seq, attempt) for seq, attempt in zip(seqs, attempts, strict=True)]
    return found


@dataclass(frozen=True)
class Snapshot:
    """What one look at the ledger sees."""

    epoch: int
    batch: int
    address: str
    cursors: dict[int, int] = field(default_factory=dict[int, int])  # by log
    ends: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])  # log: (submitted, sealed)
    logs: dict[str, int] = field(default_factory=dict[str, int])  # run: its root log
    states: dict[str, str] = field(default_factory=dict[str, str])  # by run

    @property
    def committed(self) -> int:
        return sum(self.cursors.values())


async def snapshot(reader: Reader) -> Snapshot | None:
    """None before the first coordinator has led. AwayError."""
    lease, logs, runs = await reader.rows(
        "SELECT epoch, batch, address FROM lease",
        "SELECT log, cursor, submitted, sealed FROM log",
        "SELECT run_id, root_log, state FROM run",
    )
    if not lease:
        return None
    return Snapshot(
        *lease[0],
        cursors={log: cursor for log, cursor, _, _ in logs},
        ends={log: (submitted, sealed) for log, _, submitted, sealed in logs},
        logs={run: log for run, log, _ in runs},
        states={run: state for run, _, state in runs},
    )


BESIDE = "script"
"""Workload of the run that goes on beside the batches. No fault waits until its rows, which take longer, are done."""


async def in_flight(reader: Reader) -> dict[str, set[tuple[int, int]]]:
    """(log, seq) of a batch's attempts that each incarnation holds: assigned, without a result, not ended. AwayError."""
    assigned, results, ended = await reader.rows(
        "SELECT worker, keys FROM assignment",
        "SELECT result.log, result.seq FROM result JOIN log ON log.log = result.log JOIN run ON run.run_id = log.run_id"
        " WHERE run.state = 'running'",
        "SELECT attempt.log, attempt.seq, attempt.attempt FROM attempt JOIN log ON log.log = attempt.log"
        " JOIN run ON run.run_id = log.run_id WHERE run.state = 'running'",
    )
    live = await reader.rows(f"SELECT root_log FROM run WHERE state = 'running' AND workload <> '{BESIDE}'")
    logs = {log for (log,) in live[0]}
    have, over = {tuple(row) for row in results}, {tuple(row) for row in ended}
    held: dict[str, set[tuple[int, int]]] = {}
    for worker, keys in assigned:
        for log, seq, attempt in unpack_keys(bytes(keys)):
            if log in logs and (log, seq) not in have and (log, seq, attempt) not in over:
                held.setdefault(worker, set()).add((log, seq))
    return held


async def without_result(reader: Reader, keys: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
    """Those of `keys` whose result is not durable yet. AwayError."""
    left = set(keys)
    for log in {log for log, _ in left}:
        seqs = [seq for at, seq in left if at == log]
        query = f"SELECT log, seq FROM result WHERE log = {log} AND seq BETWEEN {min(seqs)} AND {max(seqs)}"
        left -= {(row[0], row[1]) for row in (await reader.rows(query))[0]}
    return left
