"""The PostgreSQL engine: a pool whose every use is one explicit transaction.

Nothing outlives a transaction (no prepared statement, no session setting, no session lock), so a transaction-mode
pooler such as PgBouncer may be used. Even a single read is wrapped, because the pooler could otherwise send the parse
and the execution of one query to different servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random

from rollout.model.errors import (
    ConfigError,
    ConflictError,
    RolloutError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
)
from rollout.storage import migrations

Connection = Any  # asyncpg ships no useful types

CONNECT_TIMEOUT_S = 5.0
MIGRATION_S = 120.0
_MIGRATION_LOCK = 0x726F6C6C

GONE = (
    asyncpg.PostgresConnectionError,  # 08: reset, refused
    asyncpg.OperatorInterventionError,  # 57: shutting down, starting up, timeouts
    asyncpg.InsufficientResourcesError,  # 53: too many connections (a full disk is told apart first)
    asyncpg.LockNotAvailableError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.TransactionRollbackError,  # 40: deadlock
    asyncpg.ReadOnlySQLTransactionError,  # a replica
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
    TimeoutError,
)
"""The database is unavailable, or this transaction cannot continue: a retry may help. InternalClientError (`cannot
switch to state 12`) is what asyncpg raises for a connection that broke during use."""

_REFUSED = (
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.ClientConfigurationError,
    asyncpg.InsufficientPrivilegeError,
)

ERRORS = (asyncpg.PostgresError, *GONE)


class CommitUnknown(Exception):
    """The connection broke during COMMIT. Never leaves the adapters."""


def translate(error: BaseException) -> RolloutError:
    """Return the typed error of a failure, except one during COMMIT."""
    if isinstance(error, RolloutError):
        return error
    if isinstance(error, asyncpg.DiskFullError):
        return StorageFullError(
            f"the database's disk is full ({error}): nothing of this transaction was written and nothing acknowledged "
            "is lost; free some space and start again"
        )
    if isinstance(error, _REFUSED):
        return ConfigError(f"PostgreSQL refused the connection ({error}): check [storage.postgres] url")
    if isinstance(error, asyncpg.IntegrityConstraintViolationError):
        return ConflictError(f"a row is already in the database: {error}")
    if isinstance(error, GONE):
        return StorageUnavailableError(
            f"PostgreSQL cannot be reached at present ({str(error) or type(error).__name__}): check that the server "
            "of [storage.postgres] url runs and can be reached from here"
        )
    return StorageError(f"PostgreSQL failed: {error}")


def settings(timeout_ms: int, lock_ms: int | None = None) -> str:
    """Return SET LOCAL for every limit of a transaction, so that a stopped process cannot block others."""
    return (
        f"SET LOCAL statement_timeout = {timeout_ms}; SET LOCAL lock_timeout = {lock_ms or timeout_ms}; "
        f"SET LOCAL idle_in_transaction_session_timeout = {timeout_ms};"
    )


_READING = "SET LOCAL jit = off; SET LOCAL work_mem = '64MB';"
"""Compiling a look-up over a large array takes longer than the look-up; sorts of a replay stay in memory."""


class _Connection(asyncpg.Connection):  # pyright: ignore[reportMissingTypeArgument, reportUntypedBaseClass]
    """Skips the reset when a connection returns to the pool: there is no session state, and it saves a round trip."""

    def get_reset_query(self) -> str:
        return ""


def normal_url(url: str) -> str:
    """Convert SQLAlchemy's spelling of a URL."""
    return url.replace("postgresql+asyncpg://", "postgresql://", 1)


class PostgresEngine:
    """The pool. `READ_MS` limits reads; writers have their own limit."""

    READ_MS = 60_000
    BEGIN_S = 5.0
    """Time limit for the first answer to a read: a connection whose link was cut is silent for as long as TCP
    retransmits, a quarter of an hour."""

    def __init__(self, url: str, *, pool_size: int = 8):
        self.url = normal_url(url)
        self._pool_size = pool_size
        self._pool: Any = None

    async def open(self) -> None:
        """Connect and migrate. Raises ConfigError if the server refuses the credentials or has no such database."""
        if self._pool is not None:
            return
        try:
            self._pool = await asyncpg.create_pool(  # pyright: ignore[reportUnknownMemberType]
                self.url,
                min_size=0,
                max_size=self._pool_size,
                statement_cache_size=0,
                timeout=CONNECT_TIMEOUT_S,
                command_timeout=self.READ_MS / 1000,
                connection_class=_Connection,
            )
            # Another process may be creating the same tables outside of this lock.
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type(ConflictError),
                stop=stop_after_attempt(5),
                wait=wait_random(0.05, 0.3),
                reraise=True,
            ):
                with attempt:
                    await self._migrate()
        except (ValueError, *ERRORS) as error:
            await self.close()
            if isinstance(error, ValueError) and not isinstance(error, ERRORS):
                raise ConfigError(f"[storage.postgres] url is not usable: {error}") from error
            raise translate(error) from error
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            try:
                await asyncio.wait_for(pool.close(), 5)
            except TimeoutError:
                pool.terminate()

    async def _migrate(self) -> None:
        try:
            async with self.write(int(MIGRATION_S * 1000)) as db:
                await db.execute(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})", timeout=MIGRATION_S)
                await db.execute(migrations.VERSION_TABLE)
                stored = await db.fetchval(migrations.READ_VERSION)
                for statement in migrations.plan(stored, "postgresql", "the PostgreSQL database"):
                    await db.execute(statement, timeout=MIGRATION_S)
        except CommitUnknown as error:
            raise StorageUnavailableError(
                "the connection to PostgreSQL broke while its tables were looked at or made; the next try finds out"
            ) from error

    @asynccontextmanager
    async def _connection(self) -> AsyncGenerator[Connection]:
        pool = self._pool
        if pool is None:
            raise StorageUnavailableError("the PostgreSQL pool is not open")
        connection = await pool.acquire(timeout=CONNECT_TIMEOUT_S)
        given_up = False
        try:
            yield connection
        except (asyncio.CancelledError, TimeoutError):
            # An answer is still due. asyncpg would ask the server to cancel, wait for that, and where the server cannot
            # be reached raise TimeoutError in place of the cancellation, which would then be lost.
            given_up = True
            raise
        finally:
            # A connection that broke has already left its pool, and every call on it is an InterfaceError.
            with suppress(asyncpg.InterfaceError):
                if given_up or connection.is_in_transaction():
                    # Cancelled in the middle: whatever it was, it must not reach the next user.
                    connection.terminate()
            await pool.release(connection)

    @asynccontextmanager
    async def write(self, timeout_ms: int) -> AsyncGenerator[Connection]:
        """Run one transaction, READ COMMITTED. Raises typed errors, or CommitUnknown.

        The server limits each statement to `timeout_ms`. If it does not respond at all, all statements together have
        twice as long here, and COMMIT as long again.
        """
        try:
            async with self._connection() as db:
                await db.execute(f"BEGIN; {settings(timeout_ms)}", timeout=timeout_ms / 1000)
                try:
                    async with asyncio.timeout(2 * timeout_ms / 1000):
                        yield db
                except (asyncio.CancelledError, TimeoutError):
                    raise  # an answer is due: the connection is dropped, and the server rolls back
                except BaseException:
                    await _roll_back(db)
                    raise
                try:
                    await db.execute("COMMIT", timeout=timeout_ms / 1000)
                except GONE as error:
                    raise CommitUnknown from error
        except ERRORS as error:
            raise translate(error) from error

    @asynccontextmanager
    async def read(self) -> AsyncGenerator[Connection]:
        """Run one read-only transaction with a consistent view of the data."""
        try:
            async with self._connection() as db:
                await db.execute(
                    f"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; {settings(self.READ_MS)} {_READING}",
                    timeout=self.BEGIN_S,
                )
                try:
                    yield db
                finally:
                    await _roll_back(db)
        except ERRORS as error:
            raise translate(error) from error


async def _roll_back(db: Connection) -> None:
    """Roll back. A failure is harmless: the owner drops the connection, and the server rolls back."""
    with suppress(*ERRORS):
        if not db.is_closed():
            await db.execute("ROLLBACK", timeout=2)
