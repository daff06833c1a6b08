"""The lease keeper on virtual time, over a real ledger of each kind."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest
from rollout.config.settings import StorageSection
from rollout.files import FileLock
from rollout.model.errors import ConfigError, FencedError, StorageUnavailableError
from rollout_coordinator.core.step import Writes
from rollout_coordinator.lease import LeaseKeeper, file_lock_path
from rollout_coordinator.ledger import Fence, LeaseRow, Ledger, open_ledger

TTL, MARGIN = 6.0, 0.5


class VirtualTime:
    """Time that only `advance` moves. Tasks made by `run` are waited for until they sleep or end."""

    def __init__(self) -> None:
        self.now = 100.0
        self._tasks: dict[asyncio.Task[Any], tuple[float, asyncio.Event] | None] = {}
        self._parked = asyncio.Event()

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        task = asyncio.current_task()
        assert task in self._tasks
        wake = asyncio.Event()
        self._tasks[task] = (self.now + seconds, wake)
        self._parked.set()
        await wake.wait()

    async def run(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(coroutine)
        self._tasks[task] = None
        task.add_done_callback(lambda _: self._parked.set())
        await self._settle()
        return task

    async def _settle(self) -> None:
        while any(parked is None and not task.done() for task, parked in self._tasks.items()):
            await self._parked.wait()
            self._parked.clear()

    async def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            await self._settle()
            due = [(p[0], p[1], t) for t, p in self._tasks.items() if p is not None and not t.done() and p[0] <= end]
            if not due:
                break
            at, wake, task = min(due, key=lambda entry: entry[0])
            self.now = max(self.now, at)
            self._tasks[task] = None
            wake.set()
        self.now = end

    async def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class FlakyLedger:
    """A ledger whose lease calls fail while `broken`."""

    def __init__(self, inner: Ledger):
        self._inner = inner
        self.broken = False
        self.renewals = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _check(self) -> None:
        if self.broken:
            raise StorageUnavailableError("gone for the test")

    async def read_lease(self) -> LeaseRow | None:
        self._check()
        return await self._inner.read_lease()

    async def swap_lease(self, old: LeaseRow, new: LeaseRow) -> bool:
        self._check()
        return await self._inner.swap_lease(old, new)

    async def renew_lease(self, holder: str, epoch: int) -> bool:
        self._check()
        self.renewals += 1
        return await self._inner.renew_lease(holder, epoch)


@pytest.fixture
async def ledger(storage_section: StorageSection) -> AsyncIterator[FlakyLedger]:
    opened = open_ledger(storage_section)
    await opened.open()
    yield FlakyLedger(opened)
    await opened.close()


@pytest.fixture
async def time() -> AsyncIterator[VirtualTime]:
    made = VirtualTime()
    yield made
    await made.cancel()


def keeper(ledger: FlakyLedger, time: VirtualTime, name: str = "a", lock: Path | None = None) -> LeaseKeeper:
    return LeaseKeeper(cast(Ledger, ledger), name, f"{name}:1", TTL, time.clock, MARGIN, lock, time.sleep)


async def test_the_first_holder_has_epoch_0(ledger: FlakyLedger, time: VirtualTime) -> None:
    first = keeper(ledger, time)
    assert not first.trusted() and not first.leading
    assert await first.acquire() == Fence(0, 0)
    assert first.trusted() and first.leading and first.epoch == 0
    assert first.leader_hint() == "a:1"
    await ledger.commit(Fence(0, 0), Writes())


async def test_trust_ends_before_the_ttl_without_renewal(ledger: FlakyLedger, time: VirtualTime) -> None:
    first = keeper(ledger, time)
    await first.acquire()
    await time.advance(TTL - MARGIN - 0.1)
    assert first.trusted()
    await time.advance(0.1)
    assert not first.trusted()
    first.extend(time.now)  # a transaction that went through counts like a renewal
    assert first.trusted()


async def test_renewals_keep_it(ledger: FlakyLedger, time: VirtualTime) -> None:
    first, second = keeper(ledger, time), keeper(ledger, time, "b")
    await first.acquire()
    await time.run(first.run_renewals())
    waiting = await time.run(second.acquire())
    await time.advance(10 * TTL)
    assert first.trusted() and not waiting.done()
    assert second.leader_hint() == "a:1"
    assert ledger.renewals == 30


async def test_a_holder_that_is_gone_is_followed_after_the_ttl(ledger: FlakyLedger, time: VirtualTime) -> None:
    first, second = keeper(ledger, time), keeper(ledger, time, "b")
    await first.acquire()
    await ledger.commit(Fence(0, 0), Writes())
    await time.advance(2.0)
    waiting = await time.run(second.acquire())
    await time.advance(TTL - 0.1)
    assert not waiting.done()  # however old the row is, it was seen only now
    assert not first.trusted()
    await time.advance(1.0)
    assert await waiting == Fence(1, 1)
    assert second.epoch == 1
    assert second.before is not None and (second.before.holder, second.before.released) == ("a", False)
    assert second.before_moved is None, "nobody knows for how long the row was as it was found"
    row = await ledger.read_lease()
    assert row is not None and (row.holder, row.epoch, row.released) == ("b", 1, False)


async def test_a_transaction_of_the_holder_is_a_sign_of_life(ledger: FlakyLedger, time: VirtualTime) -> None:
    first, second = keeper(ledger, time), keeper(ledger, time, "b")
    await first.acquire()
    waiting = await time.run(second.acquire())
    for batch in range(4):
        await time.advance(TTL - 1)
        await ledger.commit(Fence(0, batch), Writes())
    assert not waiting.done()
    seen = time.now
    await time.advance(TTL + 1)
    assert waiting.done() and second.before_moved is not None and 0 <= second.before_moved - seen <= 1


async def test_the_deposed_holder_is_told_and_can_write_nothing(ledger: FlakyLedger, time: VirtualTime) -> None:
    first, second = keeper(ledger, time), keeper(ledger, time, "b")
    await first.acquire()
    waiting = await time.run(second.acquire())
    await time.advance(TTL + 1)
    assert (await waiting).epoch == 1
    with pytest.raises(FencedError):
        await ledger.commit(Fence(0, 0), Writes())
    renewing = await time.run(first.run_renewals())
    await time.advance(0.1)
    with pytest.raises(FencedError, match="epoch 1"):
        await renewing
    assert not first.leading and not first.trusted() and first.leader_hint() == "b:1"
    await first.release()
    row = await ledger.read_lease()
    assert row is not None and (row.holder, row.released) == ("b", False)


async def test_a_clean_stop_hands_over_at_once(ledger: FlakyLedger, time: VirtualTime) -> None:
    first, second = keeper(ledger, time), keeper(ledger, time, "b")
    await first.acquire()
    renewing = await time.run(first.run_renewals())
    waiting = await time.run(second.acquire())
    await first.release()
    await time.advance(1.0)
    assert (await waiting).epoch == 1
    await time.advance(TTL)
    assert renewing.done() and renewing.exception() is None


async def test_the_row_is_never_emptied(ledger: FlakyLedger, time: VirtualTime) -> None:
    for epoch in range(3):
        holder = keeper(ledger, time, f"h{epoch}")
        assert (await holder.acquire()).epoch == epoch
        await holder.release()
        row = await ledger.read_lease()
        assert row is not None and (row.epoch, row.released) == (epoch, True)


async def test_two_challengers_one_winner(ledger: FlakyLedger, time: VirtualTime) -> None:
    await keeper(ledger, time).acquire()
    challengers = [await time.run(keeper(ledger, time, name).acquire()) for name in "bcd"]
    await time.advance(TTL + 1)
    done = [task.result() for task in challengers if task.done()]
    assert [fence.epoch for fence in done] == [1]


async def test_a_store_that_blinks_costs_nothing(ledger: FlakyLedger, time: VirtualTime) -> None:
    first = keeper(ledger, time)
    await first.acquire()
    renewing = await time.run(first.run_renewals())
    await time.advance(3.0)
    ledger.broken = True
    await time.advance(2.0)
    assert first.trusted()
    ledger.broken = False
    await time.advance(3.0)
    assert first.trusted() and not renewing.done()


async def test_trust_ends_while_the_store_is_away_and_returns_with_it(ledger: FlakyLedger, time: VirtualTime) -> None:
    first = keeper(ledger, time)
    await first.acquire()
    await time.run(first.run_renewals())
    ledger.broken = True
    await time.advance(TTL)
    assert not first.trusted() and first.leading
    ledger.broken = False
    await time.advance(TTL / 3)
    assert first.trusted()


async def test_a_challenger_waits_through_an_outage(ledger: FlakyLedger, time: VirtualTime) -> None:
    await keeper(ledger, time).acquire()
    waiting = await time.run(keeper(ledger, time, "b").acquire())
    ledger.broken = True
    await time.advance(2 * TTL)
    assert not waiting.done()
    ledger.broken = False
    await time.advance(1.0)
    assert (await waiting).epoch == 1  # the same row as before the outage: its holder's trust has long ended


async def test_a_released_lease_that_could_not_be_marked_expires(ledger: FlakyLedger, time: VirtualTime) -> None:
    first = keeper(ledger, time)
    await first.acquire()
    ledger.broken = True
    await first.release()
    assert not first.trusted()


async def test_the_same_keeper_can_stand_by_again(ledger: FlakyLedger, time: VirtualTime) -> None:
    first = keeper(ledger, time)
    await first.acquire()
    assert await first.acquire() == Fence(1, 0)
    assert first.epoch == 1


# ---- the file lock


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return file_lock_path(tmp_path / "data" / "rollout.db")


async def test_with_the_file_lock_a_restart_need_not_wait(ledger: FlakyLedger, time: VirtualTime, lock: Path) -> None:
    await ledger.insert_lease(LeaseRow("a ghost", 4, 17, 3, False, "x:1"))
    restarted = keeper(ledger, time, "b", lock)
    assert await restarted.acquire() == Fence(5, 17)
    await time.advance(100 * TTL)
    assert restarted.trusted()  # nobody else can have it
    await restarted.release()
    assert not restarted.trusted()


async def test_a_second_coordinator_on_the_same_file_stands_by(
    ledger: FlakyLedger, time: VirtualTime, lock: Path
) -> None:
    first, second = keeper(ledger, time, "a", lock), keeper(ledger, time, "b", lock)
    await first.acquire()
    waiting = await time.run(second.acquire())
    await time.advance(100 * TTL)
    assert not waiting.done()
    assert second.leader_hint() == "a:1"
    await first.release()
    await time.advance(1.0)
    assert (await waiting).epoch == 1
    await second.release()


async def test_a_cancelled_standby_leaves_no_lock(ledger: FlakyLedger, time: VirtualTime, lock: Path) -> None:
    ledger.broken = True
    waiting = await time.run(keeper(ledger, time, "a", lock).acquire())
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    taken = FileLock(lock)
    assert taken.try_acquire()
    taken.release()


def test_the_lock_ends_with_its_process(lock: Path) -> None:
    code = (
        "import sys, pathlib; from rollout.files import FileLock;"
        "lock = FileLock(pathlib.Path(sys.argv[1])); assert lock.try_acquire();"
        "print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with holder:
        assert holder.stdin is not None and holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        mine = FileLock(lock)
        assert not mine.try_acquire()
        holder.kill()
        holder.wait()
        assert mine.try_acquire() and mine.held
        mine.release()


async def test_a_lock_file_that_cannot_be_made(ledger: FlakyLedger, time: VirtualTime, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="lock file"):
        await keeper(ledger, time, "a", tmp_path / "file" / "lock").acquire()


def test_a_margin_as_long_as_the_ttl_is_refused() -> None:
    with pytest.raises(ConfigError, match="margin"):
        LeaseKeeper(None, "a", "a:1", 1.0, margin=1.0)  # type: ignore[arg-type]


# ---- the row


async def test_the_lease_row_is_swapped_whole(ledger: FlakyLedger) -> None:
    row = LeaseRow("a", 0, 3, 5, False, "a:1")
    assert await ledger.insert_lease(row)
    assert not await ledger.insert_lease(row)
    changes: list[dict[str, Any]] = [
        {"holder": "b"}, {"epoch": 1}, {"batch": 4}, {"beat": 6}, {"released": True}, {"address": "b:1"},
    ]  # fmt: skip
    for change in changes:
        assert not await ledger.swap_lease(dataclasses.replace(row, **change), LeaseRow("c", 9, 9, 9, False, ""))
    assert await ledger.swap_lease(row, LeaseRow("c", 9, 9, 9, True, ""))
    assert await ledger.read_lease() == LeaseRow("c", 9, 9, 9, True, "")


async def test_renewal_heeds_holder_epoch_and_release(ledger: FlakyLedger) -> None:
    row = LeaseRow("a", 2, 3, 5, False, "a:1")
    await ledger.insert_lease(row)
    assert await ledger.renew_lease("a", 2)
    assert await ledger.read_lease() == dataclasses.replace(row, beat=6)
    assert not await ledger.renew_lease("a", 1)
    assert not await ledger.renew_lease("b", 2)
    await ledger.swap_lease(dataclasses.replace(row, beat=6), dataclasses.replace(row, released=True))
    assert not await ledger.renew_lease("a", 2)
