"""A worker whose machine is taken away: what is lost there uses up no try of its item."""

from __future__ import annotations

import pytest
from core_world import FakeWorker, World
from rollout.model.item import AttemptEnd, Failure, ItemSpec
from rollout.model.run import RunState
from rollout.model.worker import WorkerState
from rollout_coordinator.core.events import WorkerLeaving

CRASH = Failure("executor_crashed", "SIGTERM", True, worker_lost=True)
NO_ROOM = ItemSpec(max_attempts=1, max_worker_lost=1)
"""One failure, or one loss, would be the end."""


def noticed(worker: FakeWorker, preempted: bool = True) -> None:
    worker.world.step(WorkerLeaving(worker.session, "spot", preempted))
    worker.draining = True


def begun(spec: ItemSpec = NO_ROOM) -> tuple[World, FakeWorker, tuple[int, int]]:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(1, specs=spec)
    w.seal(1)
    key = (w.root(), 0)
    a.start(key)
    return w, a, key


def test_nothing_that_is_lost_after_a_notice_counts() -> None:
    w, first, key = begun()
    for n, how in enumerate(["vanishes", "crashes", "fails", "gives back"]):
        worker = first if n == 0 else w.worker(f"B{n}")
        if n:
            worker.start(key)
        noticed(worker)
        if how == "crashes":
            worker.finish(key, failure=CRASH)
        elif how == "fails":
            worker.finish(key, failure=Failure("engine_error", "its engine is gone"))
        elif how == "gives back":
            worker.release(key)
        worker.alive = False
        w.pass_time(8.0)
    last = w.worker("C")
    assert key not in last.isolated and last.failures.get(key, 0) == 0
    w.drain_all()
    assert (w.view().state, w.view().done, w.view().worker_lost) == (RunState.COMPLETED, 1, 0)
    ends = [(row.end, row.code) for row in w.ledger.attempts.values()]
    assert ends == [(AttemptEnd.RELEASED, "preempted")] * 3 + [(AttemptEnd.RELEASED, "drain")]


@pytest.mark.parametrize("notice", [False, None])
def test_without_notice_a_loss_counts(notice: bool | None) -> None:
    """None at all, or a drain for another reason."""
    w, a, _ = begun()
    if notice is not None:
        noticed(a, notice)
    a.alive = False
    w.pass_time(8.0)
    assert (w.view().failed, w.view().state) == (1, RunState.COMPLETED)


def test_what_no_other_worker_can_mend_fails_all_the_same() -> None:
    w, a, key = begun()
    noticed(a)
    a.finish(key, failure=Failure("bad_row", "no such column", False))
    assert w.view().failed == 1


def test_what_must_not_run_twice_does_not_after_a_notice_either() -> None:
    w, a, _ = begun(ItemSpec(fail_on_worker_lost=True))
    noticed(a)
    a.alive = False
    w.pass_time(8.0)
    assert w.view().failed == 1


def test_a_worker_that_leaves_gets_nothing_more_and_tells_a_new_leader_why() -> None:
    w, a, _ = begun()
    noticed(a)
    assert w.ledger.workers["A"].state is WorkerState.DRAINING
    a.preempted = True
    w.restart()
    a.hello()
    a.alive = False
    w.pass_time(8.0)
    w.worker("B")
    w.drain_all()
    assert (w.view().done, w.view().worker_lost) == (1, 0)
