"""The lease: one row that makes one coordinator the leader.

Absent -> epoch 0; every new holder -> epoch + 1; the row is never emptied. No wall clocks are compared: a challenger
steals after it saw the same row unchanged for TTL on its own monotonic clock, and the holder trusts its lease until the
*start* of its last successful write + TTL - margin. On SQLite an OS file lock beside the database comes first: its
owner may steal at once, because the kernel releases the lock when its owner dies.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog
from rollout.files import FileLock
from rollout.model.errors import ConfigError, FencedError, StorageError, StorageFullError, StorageUnavailableError
from rollout.model.events import LEASE_ACQUIRED

from rollout_coordinator.ledger.ledger import Ledger
from rollout_coordinator.ledger.port import Fence, LeaseRow

log = structlog.get_logger()

RELEASE_TRIES = 5


def file_lock_path(database: str | Path) -> Path:
    """Return the path of a SQLite database's lock, beside the database."""
    path = Path(database).expanduser()
    return path.with_name(f"{path.name}.leader")


class LeaseKeeper:
    """Acquires, renews and releases the lease. Times are in seconds; `clock` and `sleep` are monotonic, or virtual.

    `holder` names this incarnation and must be new with every start; `address` is published to others.
    """

    def __init__(
        self,
        ledger: Ledger,
        holder: str,
        address: str,
        ttl: float,
        clock: Callable[[], float] = time.monotonic,
        margin: float = 0.5,
        file_lock: Path | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        if not 0 <= margin < ttl:
            raise ConfigError(f"the lease's margin ({margin} s) must be less than its TTL ({ttl} s)")
        self._ledger = ledger
        self._holder = holder
        self._address = address
        self._ttl = ttl
        self._clock = clock
        self._margin = margin
        self._sleep = sleep
        self._poll = min(0.5, ttl / 10)
        self._lock = FileLock(file_lock) if file_lock is not None else None
        self._epoch = 0
        self._leading = False
        self._started = float("-inf")  # of the last attempt that wrote the row
        self._hint = ""
        self._told = ""
        self.before: LeaseRow | None = None  # as this one found it, and as it was when it won
        self.before_moved: float | None = None  # when it was last seen to change, by `clock`
        self.on_store: Callable[[StorageError | None], None] = lambda error: None  # it fails so; None: it answers

    @property
    def epoch(self) -> int:
        """Epoch of the current or last tenure; 0 before the first."""
        return self._epoch

    @property
    def leading(self) -> bool:
        """Whether the lease was acquired and neither released nor lost; says nothing of `trusted`."""
        return self._leading

    def trusted(self, now: float | None = None) -> bool:
        """Return whether the holder may act as leader at `now` (default: the clock's)."""
        if not self._leading:
            return False
        if self._lock is not None:
            return self._lock.held  # nobody else can have stolen it, however long a write took
        return (self._clock() if now is None else now) < self._started + self._ttl - self._margin

    def leader_hint(self) -> str:
        """Address of the leader as last seen, or ""."""
        return self._address if self._leading else self._hint

    def extend(self, started: float) -> None:
        """Extend the lease: a fenced ledger transaction that began at `started` succeeded, which changes the row like a
        renewal."""
        if self._leading:
            self._started = max(self._started, started)

    # ---- acquire

    async def acquire(self) -> Fence:
        """Stand by until the lease is won, and return the fence of the first transaction. Raises ConfigError if the
        lock file fails."""
        self.before = self.before_moved = None
        try:
            if self._lock is not None:
                await self._wait_for_file(self._lock)
            return await self._win_row()
        except BaseException:
            if self._lock is not None:
                self._lock.release()
            raise

    async def _win_row(self) -> Fence:
        seen: LeaseRow | None = None
        seen_at = 0.0
        while True:
            try:
                started = self._clock()
                row = await self._ledger.read_lease()
                if row is None:
                    won = LeaseRow(self._holder, 0, 0, 0, False, self._address)
                    if await self._ledger.insert_lease(won):
                        return self._win(won, started)
                    continue
                now = self._clock()
                if row != seen:
                    seen, seen_at = row, now
                    self._see(row)
                # Under its own name: a write of unknown outcome, or a tenure that this keeper gave up.
                own = row.holder == self._holder
                if self._lock is not None or own or row.released or now - seen_at >= self._ttl:
                    won = LeaseRow(self._holder, row.epoch + 1, row.batch, row.beat + 1, False, self._address)
                    started = self._clock()
                    if await self._ledger.swap_lease(row, won):
                        return self._win(won, started)
                    continue
                self._answers()
            except StorageFullError:
                raise
            except StorageUnavailableError as error:
                self._tell("lease_store_unavailable", error)
            await self._sleep(self._poll)

    async def _wait_for_file(self, lock: FileLock) -> None:
        told = False
        while not lock.try_acquire():
            row = await self._peek()
            if row is not None:
                self._see(row, quiet=True)
            if not told:
                told = True
                log.info(
                    "lease_standby", lock=str(lock.path), leader=self._hint, reason="another coordinator has it open"
                )
            await self._sleep(self._poll)

    async def _peek(self) -> LeaseRow | None:
        try:
            return await self._ledger.read_lease()
        except StorageUnavailableError as error:
            log.warning("lease_store_unavailable", error=str(error))
            return None

    def _see(self, row: LeaseRow, quiet: bool = False) -> None:
        if row != self.before:
            if self.before is not None:
                self.before_moved = self._clock()
            self.before = row
        hint = "" if row.released or row.holder == self._holder else row.address
        if hint and hint != self._hint and not quiet and self._lock is None:
            log.info("lease_standby", leader=hint, epoch=row.epoch)
        self._hint = hint

    def _win(self, row: LeaseRow, started: float) -> Fence:
        self._epoch, self._leading = row.epoch, True
        self._answers()
        self._started = started
        self._hint = ""
        log.info(LEASE_ACQUIRED, epoch=row.epoch, holder=self._holder)
        return Fence(row.epoch, row.batch)

    # ---- keep

    async def run_renewals(self) -> None:
        """Renew every TTL/3, counted from the start of the attempt, until released. Raises FencedError for another
        epoch."""
        due = self._started + self._ttl / 3
        while self._leading:
            await self._sleep(max(0.0, due - self._clock()))
            if not self._leading:
                return
            due = await self._renew()

    async def _renew(self) -> float:
        """Renew, and return when the next attempt is due."""
        epoch, started = self._epoch, self._clock()
        try:
            held = await self._ledger.renew_lease(self._holder, epoch)
        except StorageError as error:
            # Sooner than usual: what is left of the TTL is running out. Past it `trusted` is false.
            self._tell("lease_renewal_failed", error)
            return self._clock() + self._poll
        self._answers()
        if not self._leading:
            return started  # released meanwhile
        if not held:
            self._fall()
            row = await self._peek()
            if row is not None:
                self._see(row, quiet=True)
            raise FencedError(
                f"another coordinator took the lease (epoch {row.epoch if row else 'unknown'}, this one had {epoch})"
            )
        self._started = max(self._started, started)
        return started + self._ttl / 3

    def fenced(self) -> None:
        """Note that the ledger refused a transaction of this tenure, as if a renewal had failed."""
        self._fall()

    def _tell(self, event: str, error: StorageError) -> None:
        """Log each cause once, until the store responds."""
        if str(error) != self._told:
            self._told = str(error)
            log.warning(event, error=self._told, trusted=self.trusted())
        self.on_store(error)

    def _answers(self) -> None:
        self._told = ""
        self.on_store(None)

    def _fall(self) -> None:
        self._leading = False
        if self._lock is not None:
            self._lock.release()

    async def release(self) -> None:
        """Mark the row, which keeps its epoch, so that a standby steals at once. Never raises StorageError."""
        leading, self._leading = self._leading, False
        try:
            if leading:
                await self._mark_released(self._epoch)
        except StorageError as error:
            log.warning("lease_not_released", error=str(error), hint="a standby takes over after the TTL")
        finally:
            if self._lock is not None:
                self._lock.release()

    async def _mark_released(self, epoch: int) -> None:
        # Again when the row changed in between, e.g. by a transaction that was still under way.
        for _ in range(RELEASE_TRIES):
            row = await self._ledger.read_lease()
            if row is None or row.epoch != epoch or row.holder != self._holder:
                return
            released = LeaseRow(row.holder, row.epoch, row.batch, row.beat + 1, True, row.address)
            if await self._ledger.swap_lease(row, released):
                return
