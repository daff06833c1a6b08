"""Scenarios: one behaviour of the core each, told as what happens and what must follow. Here: attempts, and workers that fail."""

from __future__ import annotations

from core_world import World
from rollout.model.item import NO_LIMIT, Failure, ItemSpec
from rollout.model.run import RunState
from rollout_coordinator.core.events import (
    WorkerGoodbye,
)


def test_a_run_completes() -> None:
    w = World()
    a, b = w.worker("A"), w.worker("B")
    w.open()
    w.submit(10)
    assert len(a.held) == 4 and len(b.held) == 4
    w.seal(10)
    w.drain_all()
    view = w.view()
    assert (view.state, view.cursor, view.done) == (RunState.COMPLETED, 10, 10)
    assert w.events("run_completed")
    assert not w.ledger.assignments


def test_a_silent_worker_fails_once_and_its_items_run_elsewhere() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(3)
    a.start((w.root(), 0))
    a.alive = False
    b = w.worker("B")
    w.pass_time(5.5)
    assert not w.events("worker_failed")
    w.pass_time(1.0)
    assert len(w.events("worker_failed")) == 1
    assert len(b.held) == 3 and w.view().worker_lost == 1
    w.seal(3)
    w.drain_all()
    assert w.view().state is RunState.COMPLETED


def test_own_stall_is_nobodys_silence() -> None:
    w = World()
    w.worker("A")
    w.mono += 60
    w.wall += 60_000
    w.pass_time(1.0)
    assert not w.events("worker_failed")


def test_failures_retry_with_backoff_then_fail() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(1, specs=ItemSpec(max_attempts=2))
    key = (w.root(), 0)
    a.finish(key, failure=Failure("boom", "no"))
    assert not a.held
    w.pass_time(1.2)
    assert a.held[key] == 2
    a.finish(key, failure=Failure("boom", "no"))
    w.seal(1)
    assert (w.view().state, w.view().failed, w.view().retried) == (RunState.COMPLETED, 1, 1)


def test_a_killer_item_is_isolated_and_becomes_a_dead_letter() -> None:
    w = World()
    w.open()
    w.submit(1)
    key = (w.root(), 0)
    for n in range(3):
        a = w.worker(f"A{n}")
        a.start(key)
        assert (key in a.isolated) == (n == 2)
        a.finish(key, failure=Failure("crash", "segfault", worker_lost=True))
        a.alive = False
        w.step(WorkerGoodbye(a.session, "done"))
    assert w.view().failed == 1
    assert w.ledger.results[key[0]][0][3].code == "dead_letter"


def test_an_item_that_may_be_lost_for_ever_is_never_isolated() -> None:
    w = World()
    w.open()
    w.submit(1, specs=ItemSpec(max_worker_lost=NO_LIMIT))
    key = (w.root(), 0)
    for n in range(4):
        a = w.worker(f"A{n}")
        a.start(key)
        assert key not in a.isolated
        a.finish(key, failure=Failure("crash", "segfault", worker_lost=True))
        a.alive = False
        w.step(WorkerGoodbye(a.session, "done"))


def test_restart_keeps_attempts_and_reconciles() -> None:
    w = World()
    a, b = w.worker("A"), w.worker("B")
    w.open()
    w.submit(8)
    first = sorted(a.held)
    a.start(first[0])
    done = {first[1]: a.held.pop(first[1])}
    a.unacked.update(done)
    del a.held[first[2]]  # the frame never arrived
    w.restart()
    a.hello()
    assert a.unacked == done, "asked to send it again"
    a.send(done)
    assert not a.unacked
    w.pass_time(8.0, beat=True)
    assert w.view().state is RunState.RUNNING and b.session == ""
    b.hello()
    w.seal(8)
    w.drain_all()
    assert w.view().state is RunState.COMPLETED and w.view().worker_lost == 0


def test_stale_and_impossible_results() -> None:
    w = World()
    a, b = w.worker("A"), w.worker("B", credit=0)
    w.open()
    w.submit(2)
    key = (w.root(), 0)
    b.send({key: 1})
    assert w.view().stale == 1 and not b.unacked
    a.send({(w.root(), 99): 1})
    assert w.events("worker_quarantined") and w.closed
    assert a.session == ""
    a.hello()
    assert a.session == ""


def test_the_window_is_bounded() -> None:
    w = World(window_items=50)
    w.open()
    w.submit(500)
    assert w.core.gauges()["window_items"] <= 50
    w.worker("A", credit=30)
    w.seal(500)
    w.drain_all()
    assert w.view().state is RunState.COMPLETED
