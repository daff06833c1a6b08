"""The lease over a store that takes its time: what counts is when a write was begun."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rollout_coordinator.lease import LeaseKeeper
from rollout_coordinator.ledger import LeaseRow

TTL, MARGIN = 6.0, 0.5


class SlowLease:
    """One row in memory; every write takes `takes` seconds of a clock that nothing else moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.takes = 0.0
        self.row: LeaseRow | None = None

    async def read_lease(self) -> LeaseRow | None:
        return self.row

    async def insert_lease(self, row: LeaseRow) -> bool:
        self.now += self.takes
        self.row = self.row or row
        return self.row is row

    async def swap_lease(self, old: LeaseRow, new: LeaseRow) -> bool:
        self.now += self.takes
        if self.row != old:
            return False
        self.row = new
        return True

    async def renew_lease(self, holder: str, epoch: int) -> bool:
        assert self.row is not None
        held = (self.row.holder, self.row.epoch) == (holder, epoch)
        if held:
            self.row = replace(self.row, beat=self.row.beat + 1)
        self.now += self.takes  # the answer is slow, not the write
        return held

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def keeper(ledger: SlowLease, name: str = "a") -> LeaseKeeper:
    return LeaseKeeper(ledger, name, f"{name}:1", TTL, lambda: ledger.now, MARGIN, None, ledger.sleep)  # type: ignore[arg-type]


@pytest.mark.parametrize("stolen", [False, True], ids=["from absent", "stolen"])
async def test_a_lease_is_trusted_from_the_start_of_the_write_that_won_it(stolen: bool) -> None:
    ledger = SlowLease()
    if stolen:
        ledger.row = LeaseRow("ghost", 3, 0, 0, True, "")
    ledger.takes = 4.0
    began = ledger.now
    first = keeper(ledger)
    await first.acquire()
    assert first.trusted() and ledger.now == began + 4.0
    ledger.now = began + TTL - MARGIN
    assert not first.trusted(), "a challenger may have seen the row since the write reached the store"


async def test_a_renewal_counts_from_its_start() -> None:
    ledger = SlowLease()
    first = keeper(ledger)
    await first.acquire()
    ledger.takes = 4.0
    began = ledger.now
    await first._renew()  # pyright: ignore[reportPrivateUsage]
    assert first.trusted() and ledger.now == began + 4.0
    ledger.now = began + TTL - MARGIN
    assert not first.trusted()


async def test_who_was_deposed_without_knowing_does_not_release_its_successors_lease() -> None:
    ledger = SlowLease()
    first = keeper(ledger)
    await first.acquire()
    ledger.row = LeaseRow("b", 1, 0, 0, False, "b:1")
    await first.release()
    assert ledger.row == LeaseRow("b", 1, 0, 0, False, "b:1")
