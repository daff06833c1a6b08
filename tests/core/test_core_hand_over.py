"""An attempt that is given back in the middle, with what it had done: the next one goes on from there."""

from __future__ import annotations

import pytest
from core_world import FakeWorker, World
from rollout.model.item import HANDED_OVER, HANDED_OVER_MAX, AttemptEnd, Failure, ItemSpec
from rollout.model.run import RunState
from rollout_coordinator.core.events import WorkerLeaving

ONE, TWO, LAST = bytes(32), bytes([1]) * 32, bytes([2]) * 32


def begun(max_worker_lost: int = 1) -> tuple[World, FakeWorker, tuple[int, int]]:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(1, specs=ItemSpec(max_attempts=1, max_worker_lost=max_worker_lost))
    w.seal(1)
    key = (w.root(), 0)
    a.start(key)
    return w, a, key


def hands_over(worker: FakeWorker, key: tuple[int, int], data: bytes, *keeps: bytes) -> None:
    worker.world.step(WorkerLeaving(worker.session, "spot", True))
    worker.draining = True
    worker.finish(key, failure=Failure(HANDED_OVER, "leaves"), data=data, keeps=keeps)


def test_the_next_attempt_gets_what_was_handed_over_and_it_costs_no_try() -> None:
    w, a, key = begun()
    hands_over(a, key, b"half", ONE)
    a.alive = False
    b = w.worker("B")
    assert b.handoff[key] == b"half" and b.failures.get(key, 0) == 0
    (row,) = w.ledger.attempts.values()
    assert (row.end, row.code) == (AttemptEnd.RELEASED, HANDED_OVER)
    assert w.ledger.kept[key] == (ONE,)
    b.start(key)
    hands_over(b, key, b"more", TWO)
    assert w.ledger.kept[key] == (TWO,), "the first is needed no longer"
    b.alive = False
    c = w.worker("C")
    assert c.handoff[key] == b"more"
    c.finish(key, keeps=(LAST,))
    assert w.ledger.kept[key] == (LAST,), "nor the second"
    assert (w.view().state, w.view().done) == (RunState.COMPLETED, 1)
    assert "handed_over" not in w.ledger.logs[key[0]].extra


def test_it_outlives_a_lost_worker_and_a_new_leader() -> None:
    w, a, key = begun(max_worker_lost=5)
    hands_over(a, key, b"half", ONE)
    a.alive = False
    b = w.worker("B")
    b.start(key)
    b.alive = False
    w.pass_time(8.0)
    w.restart()
    c = w.worker("C")
    assert c.handoff[key] == b"half"
    w.drain_all()
    assert w.ledger.kept[key] == ()


@pytest.mark.parametrize("data", [b"", bytes(HANDED_OVER_MAX + 1)])
def test_what_is_none_is_given_back_without(data: bytes) -> None:
    w, a, key = begun()
    hands_over(a, key, data)
    a.alive = False
    b = w.worker("B")
    assert key in b.held and key not in b.handoff


def test_a_worker_that_stays_cannot_give_it_back_for_ever() -> None:
    w, a, key = begun()
    a.finish(key, failure=Failure(HANDED_OVER, "leaves"), data=b"half", keeps=(ONE,))
    assert (w.view().state, w.view().failed) == (RunState.COMPLETED, 1), "the only try that it had"
    assert "handed_over" not in w.ledger.logs[key[0]].extra


def test_what_nobody_goes_on_from_names_nothing() -> None:
    w, a, key = begun()
    w.verb("kill")
    hands_over(a, key, b"half", ONE)
    assert w.ledger.kept.get(key, ()) == ()


def test_of_an_item_that_ends_without_another_attempt_nothing_is_kept() -> None:
    w, a, key = begun()
    hands_over(a, key, b"half", ONE)
    a.alive = False
    w.pass_time(8.0)
    w.verb("kill")
    assert w.view().state is RunState.KILLED
