"""Wall clocks that jump: a retry waits by the clock that does not, and an item's own time stays what its user said."""

from __future__ import annotations

from core_world import FakeWorker, World
from rollout.model.item import Failure, ItemSpec

DAY_MS = 86_400_000


def failed() -> tuple[World, FakeWorker]:
    """An item failed; its next attempt is 5 to 10 s away."""
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(1, specs=ItemSpec(retry_backoff_ms=10_000))
    w.wall += DAY_MS  # the clock is wrong when it fails
    a.finish(failure=Failure("boom", "x"))
    return w, a


def test_a_clock_that_goes_back_delays_no_retry() -> None:
    w, a = failed()
    w.wall -= DAY_MS
    w.pass_time(4.5)
    assert not a.held
    w.pass_time(6.0)
    assert a.held == {(w.root(), 0): 2}


def test_a_clock_that_goes_ahead_hurries_no_retry() -> None:
    w, a = failed()
    w.wall += DAY_MS
    w.pass_time(4.5)
    assert not a.held
    w.pass_time(6.0)
    assert a.held


def test_a_new_leader_waits_no_longer_than_the_delay_was() -> None:
    w, a = failed()
    w.wall -= DAY_MS
    w.restart()
    a.hello()
    w.pass_time(4.5)
    assert not a.held
    w.pass_time(6.0)
    assert a.held


def test_nor_than_the_cap() -> None:
    w = World(retry_backoff_cap=2.0)
    w.wall += 10 * DAY_MS
    a = w.worker("A")
    w.open()
    w.submit(1, specs=ItemSpec(retry_backoff_ms=60_000, max_attempts=9))
    w.wall += DAY_MS
    for _ in range(3):
        a.finish(failure=Failure("boom", "x"))
        w.wall -= DAY_MS
        w.restart()
        a.hello()
        assert not a.held
        w.pass_time(2.5)
        assert a.held


def test_the_driver_is_asked_to_come_back_when_a_retry_is_due() -> None:
    w, _ = failed()
    w.core._state.workers["A"].due_at += 1e6  # pyright: ignore[reportPrivateUsage]
    due = w.core._state.retries[0][0]  # pyright: ignore[reportPrivateUsage]
    w.wall -= DAY_MS
    assert 5.0 <= due - w.mono <= 10.0 and w.wake_at is not None and w.wake_at <= due


def test_an_items_own_time_is_the_wall_clocks() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(1, specs=ItemSpec(not_before_ms=w.wall + 3_600_000))
    w.pass_time(10.0)
    assert not a.held
    w.wall += 3_600_000  # it was late, and was put right
    w.pass_time(0.5)
    assert a.held
