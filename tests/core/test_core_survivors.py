"""Exclusive attempts that outlive the end of their run."""

from __future__ import annotations

from typing import Any

import pytest
from core_world import FakeWorker, World
from rollout.model.item import Failure, ItemSpec, Key
from rollout.model.run import RunState
from rollout_coordinator.core.events import RunDelete, WorkerSpawn

EXCLUSIVE = ItemSpec(exclusive=True, fail_on_worker_lost=True, timeout_ms=1000)


def killed(**settings: Any) -> tuple[World, FakeWorker]:
    """Four exclusive items run at A when their run is killed; A has not stopped them yet."""
    w = World(**settings)
    a = w.worker("A")
    w.open()
    w.submit(4, specs=EXCLUSIVE)
    a.start()
    a.deaf = True
    assert w.verb("kill").state is RunState.KILLED
    a.deaf = False
    assert w.view().in_flight == 4 and {key[3] for key in w.view().survivors} == {"A"}
    return w, a


def test_a_killed_run_goes_on_with_an_exclusive_item_once_its_worker_has_stopped_it() -> None:
    w, a = killed()
    b = w.worker("B")
    w.verb("continue")
    assert not b.held and w.view().survivors == ()
    first, *others = sorted(a.held)
    a.release(first, reason="cancel")
    assert sorted([*a.held, *b.held]) == [first, *others] and (a.held | b.held)[first] == 2
    for key in others:
        a.finish(key)  # it was faster than the order to stop
    a.finish()
    b.finish()
    w.seal(4)
    view = w.view()
    assert (view.state, view.done, view.stale) == (RunState.COMPLETED, 4, 0)


@pytest.mark.parametrize("word", ["released", "result", "failure", "lost", "hello without", "restart"])
def test_nothing_comes_of_what_outlived_its_run(word: str) -> None:
    w, a = killed(ended_on_disk=True, keep_ended=30.0, orphan_grace=1.0)
    w.pass_time(5.0)  # longer than twice their timeout and the grace
    assert w.view().in_flight == 4
    spawn = WorkerSpawn(a.session, Key(w.root(), 0), 1, 0, [b"c" * 32], [b"x"], (ItemSpec(),), None, True)
    assert not w.step(spawn).writes.items, "nor of its children"
    if word == "released":
        a.release(*list(a.held), reason="cancel")
    elif word == "result":
        a.finish()
        assert not a.unacked
    elif word == "failure":
        a.finish(failure=Failure("bad", "x", False))
    elif word == "lost":
        a.silent = True
        w.pass_time(7.0)
    else:
        if word == "restart":
            w.restart()
            assert w.view().in_flight == 4
        a.held.clear()
        a.hello()
    view = w.view()
    assert (view.state, view.in_flight, view.running, view.survivors) == (RunState.KILLED, 0, 0, ())
    tried = 0 if word == "restart" else 4  # whether they had begun, the new leader was never told
    assert (view.done, view.failed, view.attempts, view.retried, view.worker_lost) == (0, 0, tried, tried, 0)
    assert not w.ledger.snapshot().runs, "over, for the next leader as well"
    w.pass_time(31.0)
    assert w.view() is None, "not in memory any more"
    b = w.worker("B", credit=8)
    w.verb("continue")
    w.pass_time(0.5)
    assert {**a.held, **b.held} == dict.fromkeys([(w.root(), n) for n in range(4)], 2)


def test_the_order_to_stop_is_given_again_on_a_new_stream() -> None:
    w, a = killed()
    a.hello()
    assert not a.held, "told to stop"
    assert w.view().in_flight == 4, "it has not said that they are over"


def test_a_deleted_run_does_not_wait_for_its_attempts() -> None:
    w, a = killed()
    assert w.ask(RunDelete, "R").error is None and w.view() is None
    assert w.core.gauges()["items_in_flight"] == 0
    a.finish()
    assert not w.closed


def test_an_exclusive_item_of_a_chain_that_is_stopping_holds_its_chain() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(3, specs=ItemSpec(exclusive=True, chain="c", pipelined=True))
    assert len(a.held) == 1, "a pipelined one could not be taken back at once"
    a.start()
    a.deaf = True
    w.verb("kill")
    a.deaf = False
    w.worker("B")
    w.verb("continue")
    w.pass_time(3.0)
    assert sum(len(worker.held) for worker in w.workers.values()) == 1
    a.release(*list(a.held), reason="cancel")
    w.pass_time(3.0)
    assert [key[1] for worker in w.workers.values() for key in worker.held] == [0]
    w.seal(3)
    w.drain_all()
    assert w.view().state is RunState.COMPLETED
