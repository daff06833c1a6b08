"""Scenarios: one behaviour of the core each, told as what happens and what must follow."""

from __future__ import annotations

from typing import Any

import pytest
from core_world import World
from rollout.model.errors import ConflictError, InputError, NotFoundError, StateError
from rollout.model.item import Failure, ItemSpec, Key
from rollout.model.run import Lane, Policy, RunState
from rollout.model.worker import Credit
from rollout_coordinator.core import step as st
from rollout_coordinator.core.events import (
    RunDelete,
    SubmitItems,
    WorkerCredit,
    WorkerGone,
    WorkerGoodbye,
    WorkerSpawn,
    WorkerWaiting,
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


def test_an_idle_worker_steals_unstarted_work() -> None:
    w = World()
    a = w.worker("A", credit=20)
    w.open()
    w.submit(20)
    a.start(*[(w.root(), s) for s in range(2)])
    thief = w.worker("B", credit=20)
    assert len(a.revokes) == 1
    a.confirm()
    assert len(thief.held) == 9 and len(a.held) == 11
    assert w.events("work_stolen") == [{"thief": "B", "victim": "A", "count": 9}]
    w.seal(20)
    w.drain_all()
    assert w.view().done == 20


def test_a_thief_that_has_begun_what_it_stole_steals_again() -> None:
    """Nothing else happens meanwhile: the victim's items take for ever."""
    w = World()
    a = w.worker("A", credit=4)
    w.open()
    w.submit(4)
    a.start((w.root(), 0), (w.root(), 1))
    thief = w.worker("B", credit=4)
    a.confirm()
    assert len(thief.held) == 1
    thief.start(*[key[:2] for key in thief.held])
    w.pass_time(0.5)
    a.confirm()
    assert len(thief.held) == 2 and len(a.held) == 2


def test_a_steal_does_not_outlive_its_victims_session() -> None:
    w = World()
    a = w.worker("A", credit=20)
    w.open()
    w.submit(20)
    w.worker("B", credit=20)
    w.step(WorkerGone(a.session))
    a.hello()
    assert a.revokes, "asked again on the new session"


def test_lane_caps_and_run_cap() -> None:
    w = World()
    a = w.worker("A", credit=50)
    w.open(lanes=(Lane("x", 2),), max_in_flight=5)
    w.submit(20, specs=[ItemSpec(lane="x"), ItemSpec()])
    assert sum(a.info[k][2].lane == "x" for k in a.held) == 2 and len(a.held) == 5
    w.seal(20)
    w.drain_all()
    assert w.view().state is RunState.COMPLETED


def test_a_chain_goes_in_order_with_its_predecessors_result() -> None:
    w = World()
    a, b = w.worker("A"), w.worker("B")
    w.open()
    w.submit(4, specs=ItemSpec(chain="c"))
    order: list[int] = []
    for n in range(4):
        holder = a if a.held else b
        ((log, seq),) = holder.held
        order.append(seq)
        assert holder.predecessors.get((log, seq)) == ((n - 1, 1, b"r%d" % (n - 1)) if n else None)
        if n == 1:
            w.restart()
            holder.hello()
        holder.finish()
        w.pass_time(2.5)
    assert order == [0, 1, 2, 3]


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
    with pytest.raises(StateError, match="continue"):
        w.verb("resume")
    w.restart()
    a.hello()
    assert w.verb("continue").state is RunState.RUNNING
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


def test_children_are_read_in_order_and_the_parent_gives_up_its_slot() -> None:
    w = World()
    a = w.worker("A", credit=2)
    w.open()
    w.submit(1, specs=ItemSpec(lane="p"))
    parent = Key(w.root(), 0)
    a.start((parent.log, parent.seq))
    spec = (ItemSpec(),)
    w.step(WorkerSpawn(a.session, parent, 1, 0, [b"c0", b"c1"], [b"x", b"y"], spec, None, True))
    w.step(WorkerWaiting(a.session, parent, 1, 0))
    assert len(a.held) == 3, "waiting frees the parent's place"
    kids = sorted(k for k in a.held if k[0] != parent.log)
    a.finish(kids[1])
    assert not a.children
    a.finish(kids[0])
    got: list[Any] = a.children[parent]
    assert [s.results.data for s in got] == [[b"r0", b"r1"]] and got[-1].complete
    assert a.resumed == [parent]
    # a second attempt finds them again
    del a.held[parent]
    a.hello()
    w.pass_time(0.5)
    assert a.held[parent] == 2
    w.step(WorkerSpawn(a.session, parent, 2, 0, [b"c0", b"c1"], [b"x", b"y"], spec, None, True))
    a.children.clear()
    w.step(WorkerWaiting(a.session, parent, 2, 0))
    assert a.children[parent][0].results.data == [b"r0", b"r1"]
    a.finish()
    w.seal(1)
    assert w.view().state is RunState.COMPLETED


def test_the_window_is_bounded() -> None:
    w = World(window_items=50)
    w.open()
    w.submit(500)
    assert w.core.gauges()["window_items"] <= 50
    w.worker("A", credit=30)
    w.seal(500)
    w.drain_all()
    assert w.view().state is RunState.COMPLETED


def test_runs_share_by_priority() -> None:
    w = World()
    w.open("R1")
    w.open("R2", priority=1)
    w.submit(100, "R1")
    w.submit(100, "R2")
    a = w.worker("A", credit=30)
    mine = [k for k in a.held if k[0] == w.root("R2")]
    assert len(a.held) == 30 and 17 <= len(mine) <= 23


def test_runs_share_by_priority_also_when_each_has_credit_of_its_own() -> None:
    w = World()
    a = w.worker("A", credit=8)
    w.open("R1")
    w.submit(100, "R1")
    w.open("R2", priority=1)
    w.submit(100, "R2")
    w.step(WorkerCredit(a.session, Credit(8, 1 << 20, (("R1", 60), ("R2", 60)))))
    mine = [k for k in a.held if k[0] == w.root("R2")]
    assert (len(a.held) - len(mine), len(mine)) == (20, 40)


def test_a_share_that_is_not_used_goes_to_the_other_run() -> None:
    """R2 has items for the worker, but its lane is full."""
    w = World()
    w.open("R1")
    w.submit(100, "R1")
    w.open("R2", priority=5, lanes=(Lane("l", 1),))
    w.submit(100, "R2", specs=ItemSpec(lane="l"))
    a = w.worker("A", credit=8)
    assert len(a.held) >= 4


def test_items_and_their_seal_in_one_step() -> None:
    w = World()
    w.open()
    step = w.step(
        SubmitItems(900, "R", 0, [b"i"], [b"p"], (ItemSpec(),)),
    )
    assert any(isinstance(s, st.Reply) for s in step.sends)


def test_children_spawned_again_while_the_first_are_compared_are_made_once() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(1)
    parent = Key(w.root(), 0)

    def spawn(first: int, n: int) -> None:
        ids = [b"%032d" % (first + i) for i in range(n)]
        w.step(WorkerSpawn(a.session, parent, 1, first, ids, [b"c"] * n, (ItemSpec(),), None, False))

    spawn(0, 5)
    w.hold_loads = True
    spawn(0, 10)  # compared with what is there
    spawn(10, 3)  # the next of the same parent, before the ledger has answered
    a.hello()
    spawn(0, 10)  # told again on a new stream
    w.hold_loads = False
    w.pass_time(0.5)
    child = next(n for n, row in w.ledger.logs.items() if row.parent_log)
    assert [row[0] for row in w.ledger.items[child]] == [b"%032d" % i for i in range(10)]
    assert w.view().failed == 0
    spawn(10, 3)
    assert len(w.ledger.items[child]) == 13


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


def test_a_parent_that_is_done_ends_its_children() -> None:
    w = World()
    a, b = w.worker("A"), w.worker("B")
    w.open()
    w.submit(2)
    parent = Key(w.root(), 0)
    holder = a if tuple(parent) in a.held else b
    ids = [b"%032d" % i for i in range(2)]
    w.step(WorkerSpawn(holder.session, parent, 1, 0, ids, [b"c"] * 2, (ItemSpec(),), None, True))
    child = next(n for n, row in w.ledger.logs.items() if row.parent_log)
    assert any(key[0] == child for key in [*a.held, *b.held])
    holder.finish(tuple(parent))
    assert not any(key[0] == child for key in [*a.held, *b.held])


def test_what_was_stolen_from_a_run_that_ends_is_not_waited_for() -> None:
    w = World()
    a = w.worker("A", credit=8)
    w.open()
    w.submit(8)
    b = w.worker("B", credit=8)
    w.pass_time(2.0)
    assert a.revokes
    w.hold_loads = True
    a.confirm()
    w.verb("kill")
    w.hold_loads = False
    w.pass_time(0.5)
    for worker in (a, b):
        assert w.core._state.workers[worker.name].incoming == 0  # pyright: ignore[reportPrivateUsage]


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
