"""Scenarios of runs: what is submitted, and the verbs."""

from __future__ import annotations

import pytest
from core_world import World
from rollout.model.errors import ConflictError, InputError, NotFoundError, StateError
from rollout.model.item import Failure, ItemSpec
from rollout.model.run import Policy, RunState
from rollout_coordinator.core import step as st
from rollout_coordinator.core.events import (
    RunCommand,
    RunDelete,
    SubmitItems,
)


def test_submit_is_idempotent_and_says_what_differs() -> None:
    w = World()
    w.open(config=b'{"model":{"path":"a"},"n":1}')
    w.submit(5)
    assert w.submit(8, first=0).durable == 8
    with pytest.raises(ConflictError, match="seq 3"):
        w.submit(2, first=3, salt=b"other")
    with pytest.raises(InputError, match="gap"):
        w.submit(1, first=20)
    with pytest.raises(ConflictError, match=r"model\.path"):
        w.open(config=b'{"model":{"path":"b"},"n":1}')
    with pytest.raises(StateError):
        w.seal(9)
    assert w.seal(8).sealed and w.seal(8).sealed
    with pytest.raises(ConflictError):
        w.seal(7)
    assert w.submit(8, first=0).durable == 8
    assert w.submit(5, first=0).durable == 5  # those behind may be another submitter's


def test_items_and_their_seal_in_one_step() -> None:
    w = World()
    w.open()
    step = w.step(
        SubmitItems(900, "R", 0, [b"i"], [b"p"], (ItemSpec(),)),
    )
    assert any(isinstance(s, st.Reply) for s in step.sends)


def test_a_submit_that_is_compared_is_answered_though_its_run_is_deleted() -> None:
    w = World()
    w.open()
    w.submit(3)
    w.hold_loads = True
    ids = [b"%032d" % i for i in range(3)]
    w.step(SubmitItems(901, "R", 0, ids, [b"p"] * 3, (ItemSpec(),), None))
    w.step(SubmitItems(902, "R", 0, ids, [b"p"] * 3, (ItemSpec(),), None))
    w.step(RunDelete(903, "R", True))
    w.hold_loads = False
    w.pass_time(0.5)
    assert isinstance(w.replies[901].error, NotFoundError)
    assert isinstance(w.replies[902].error, NotFoundError)
    assert w.replies[903].error is None


def test_pause_resume_interrupt_continue_kill_delete() -> None:
    w = World()
    a = w.worker("A")
    w.open(pause_timeout_ms=2000)
    w.submit(10)
    keys = sorted(a.held)
    a.start(*keys[:2])
    assert w.verb("pause").state is RunState.PAUSED and a.pauses == ["R"] and w.view().pausing
    a.release(*keys[2:], reason="pause")
    a.finish(keys[0])
    assert len(a.held) == 1
    w.pass_time(2.5)
    view = w.view()
    assert view.state is RunState.INTERRUPTED and view.survivors == ((keys[1][0], keys[1][1], 1, "A"),)
    w.restart()
    a.hello()
    assert w.verb("resume").state is RunState.RUNNING
    assert len(a.held) == 4
    assert w.verb("kill").state is RunState.KILLED and not a.held
    assert w.verb("kill").state is RunState.KILLED
    w.verb("continue")
    w.seal(10)
    w.drain_all()
    assert w.view().state is RunState.COMPLETED
    with pytest.raises(StateError):
        w.verb("continue")
    assert w.ask(RunDelete, "R").error is None and w.view() is None


def test_a_pause_stops_dispatch_before_it_reaches_the_workers() -> None:
    """003, edge case 5."""
    w = World()
    a = w.worker("A", credit=1)
    w.open()
    w.submit(4)
    kinds = [type(send) for send in w.step(RunCommand(901, "R", "pause")).sends]
    assert st.SendPause in kinds and st.SendAssign not in kinds
    a.finish()
    assert not a.held, "its credit stays unused"
    late = w.worker("B")
    assert not late.held
    w.verb("resume")
    assert a.held and late.held


def test_a_pause_that_some_workers_outlast_leaves_the_survivors_on_disk() -> None:
    """003, edge case 6."""
    w = World()
    a, b = w.worker("A", credit=1), w.worker("B", credit=1)
    w.open(pause_timeout_ms=2000)
    w.submit(4)
    a.start()
    b.start()
    ((log, seq),) = b.held
    w.verb("pause")
    a.finish()
    w.pass_time(2.5)
    w.restart()
    assert (w.view().state, w.view().done) == (RunState.INTERRUPTED, 1)
    assert w.view().survivors == ((log, seq, 1, "B"),)


def test_a_new_leader_goes_on_with_a_pause() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(4)
    w.verb("pause")
    w.restart()
    assert w.view().pausing
    a.hello()
    assert a.pauses == ["R", "R"], "it is asked again: the order may have been lost"
    a.release(*list(a.held), reason="pause")
    assert not w.view().pausing and w.view().state is RunState.PAUSED


def test_pause_that_is_answered_in_time_can_be_resumed() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(4)
    w.verb("pause")
    a.release(*list(a.held), reason="pause")
    assert not w.view().pausing and w.view().state is RunState.PAUSED
    w.verb("resume")
    assert len(a.held) == 4


def test_what_was_accepted_behind_an_early_stop_counts_when_the_run_continues() -> None:
    w = World()
    a = w.worker("A", credit=8)
    w.open(policies=(Policy("stop_early", (("failures", "1"),)),))
    w.submit(4, specs=ItemSpec(max_attempts=1))
    w.seal(4)
    first = min(a.held)
    a.finish(*[key for key in a.held if key != first])
    a.finish(first, failure=Failure("bad", "x", False))
    assert (w.view().state, w.view().cursor, w.view().done) == (RunState.FAILED, 1, 3)
    w.verb("continue")
    w.pass_time(0.5)  # outcomes are read from the ledger again
    view = w.view()
    assert (view.state, view.cursor, view.done, view.failed) == (RunState.COMPLETED, 4, 3, 1)


def test_a_run_that_is_killed_while_it_waits_goes_on_in_the_same_order() -> None:
    w = World()
    w.open()
    w.submit(4)
    w.verb("kill")
    w.verb("continue")
    w.pass_time(0.5)
    w.verb("kill")
    w.verb("continue")
    w.pass_time(0.5)
    a = w.worker("A", credit=8)
    assert sorted(a.held) == [(w.root(), n) for n in range(4)]
    a.finish()
    w.seal(4)
    assert w.view().state is RunState.COMPLETED
