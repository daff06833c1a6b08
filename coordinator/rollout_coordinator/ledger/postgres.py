"""The ledger on PostgreSQL: every call is one explicit transaction, every set is one statement over arrays."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from rollout.model.errors import StorageUnavailableError
from rollout.storage.postgres import CommitUnknown, Connection, PostgresEngine
from tenacity import AsyncRetrying, RetryError, retry_if_exception_type, stop_after_delay, wait_random_exponential

from rollout_coordinator.core.step import Writes
from rollout_coordinator.ledger import queries
from rollout_coordinator.ledger.ledger import Ledger, Transaction, Work
from rollout_coordinator.ledger.port import Fence
from rollout_coordinator.ledger.queries import Bulk

T = TypeVar("T")

SETS = {
    "batches": "= ANY(:batches::bigint[])",
    "given": (
        "(SELECT log, seq, attempt, n - 1 AS n"
        " FROM unnest(:logs::bigint[], :seqs::bigint[], :attempts::bigint[])"
        " WITH ORDINALITY AS u(log, seq, attempt, n))"
    ),
} | {
    name: f"SELECT unnest(:{name}::{kind}[])"
    for name, kind in (("seqs", "bigint"), ("ids", "bytea"), ("states", "text"), ("workers", "text"))
}


class PostgresLedger(Ledger):
    """The ledger in a PostgreSQL database. `ttl` is the lease's, in seconds: every transaction is limited to a third of
    it."""

    set_rows = 50_000
    fetch_rows = 500
    free_lease = queries.FREE_LEASE

    def __init__(self, url: str, *, pool_size: int = 8, ttl: float = 5.0):
        super().__init__()
        self._engine = PostgresEngine(url, pool_size=pool_size)
        self._ttl = ttl
        self._bound_ms = max(50, int(ttl * 1000 / 3) - 50)

    async def open(self) -> None:
        await self._engine.open()

    async def close(self) -> None:
        await self._engine.close()

    async def read(self, work: Work[T]) -> T:
        async with self._engine.read() as db:
            return await work(_Transaction(db))

    async def write(self, work: Work[T], limit_ms: int | None = None) -> T:
        try:
            return await self._write(work, limit_ms)
        except CommitUnknown as error:
            raise StorageUnavailableError(
                "the connection to PostgreSQL broke at COMMIT: it may be written or not, read it again"
            ) from error

    async def _write(self, work: Work[T], limit_ms: int | None = None) -> T:
        async with self._engine.write(limit_ms or self._bound_ms) as db:
            return await work(_Transaction(db))

    async def commit(self, fence: Fence, writes: Writes) -> None:
        try:
            await self._write(self.committing(fence, writes))
        except CommitUnknown as error:
            if not await self._was_committed(fence):
                raise StorageUnavailableError(
                    "the connection to PostgreSQL broke at COMMIT: nothing was written"
                ) from error

    async def _was_committed(self, fence: Fence) -> bool:
        """Read `batch` under the row's lock, so that a COMMIT still running on the server has ended by then."""
        deadline = asyncio.get_running_loop().time() + self._ttl
        try:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type(StorageUnavailableError),
                stop=stop_after_delay(self._ttl),
                wait=wait_random_exponential(multiplier=0.05, max=0.5),
            ):
                with attempt:
                    async with asyncio.timeout_at(deadline):
                        return await self._read_batch() == (fence.epoch, fence.batch + 1)
        except (RetryError, TimeoutError) as error:
            raise StorageUnavailableError(
                "the connection to PostgreSQL broke at COMMIT and did not come back in time: discard and replay"
            ) from error
        raise AssertionError("a retry loop ends in a return or an error")

    async def _read_batch(self) -> tuple[int, int] | None:
        async def work(db: Transaction) -> tuple[int, int] | None:
            found = list(await db.fetch("SELECT epoch, batch FROM lease WHERE one = 1 FOR UPDATE"))
            return tuple(found[0]) if found else None

        return await self.write(work)


@cache
def _text(query: str) -> tuple[str, tuple[str, ...]]:
    return queries.for_postgres(query.format(**SETS))


def _statement(query: str, named: Mapping[str, Any]) -> list[Any]:
    """Return the statement's text and arguments."""
    text, names = _text(query)
    if "given" in named:
        logs, seqs, attempts = (list(column) for column in zip(*named["given"], strict=True))
        named = {**named, "logs": logs, "seqs": seqs, "attempts": attempts}
    return [text, *(named[name] for name in names)]


class _Transaction:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def fetch(self, query: str, **named: Any) -> list[Any]:
        return await self._connection.fetch(*_statement(query, named))

    async def execute(self, query: str, **named: Any) -> int:
        status: str = await self._connection.execute(*_statement(query, named))
        return int(status.rsplit(" ", 1)[-1])

    async def execute_each(self, query: str, many: Sequence[dict[str, Any]]) -> None:
        if not many:
            return
        text, names = _text(query)
        await self._connection.executemany(text, [[one[name] for name in names] for one in many])

    async def pass_fence(self, fence: Fence) -> bool:
        # Literal integers: the simple protocol takes one round trip.
        fencing = queries.FENCE.replace(":epoch", str(int(fence.epoch))).replace(":batch", str(int(fence.batch)))
        return await self._connection.execute(fencing) == "UPDATE 1"

    async def insert(self, parts: Iterable[tuple[Bulk, list[Sequence[Any]]]]) -> None:
        """Insert into all tables with one statement: each insert is a CTE, so it always takes two round trips."""
        inserts: list[str] = []
        arguments: list[Any] = []
        for number, (bulk, columns) in enumerate(parts):
            rows_of = _rows(bulk, columns, arguments)
            inserts.append(f"{bulk.table}_{number} AS ({bulk.insert} {rows_of}{bulk.conflict})")
        if inserts:
            await self._connection.execute(f"WITH {', '.join(inserts)} SELECT 1", *arguments)


def _rows(bulk: Bulk, columns: list[Sequence[Any]], arguments: list[Any]) -> str:
    """Return a SELECT of these rows, over parameters that are appended to `arguments`.

    A column with the same value in every row is passed as one value: encoding an array, and unnesting it, which the
    server does for each array separately, cost about as much as the insert. A single row needs no array. With several
    rows, one column always stays an array, because it gives their number.
    """
    selected: list[str] = []
    arrays: list[str] = []
    for at, (kind, column) in enumerate(zip(bulk.types, columns, strict=True)):
        first = column[0]
        last = at == len(columns) - 1 and not arrays
        if len(column) == 1 or (not last and column[-1] == first and list(column).count(first) == len(column)):
            arguments.append(first)
            selected.append(f"${len(arguments)}::{kind}")
        else:
            arguments.append(list(column))
            arrays.append(f"${len(arguments)}::{kind}[]")
            selected.append(f"u.c{len(arrays)}")
    if not arrays:
        return f"SELECT {', '.join(selected)}"
    names = ", ".join(f"c{n}" for n in range(1, len(arrays) + 1))
    return f"SELECT {', '.join(selected)} FROM unnest({', '.join(arrays)}) AS u({names})"
