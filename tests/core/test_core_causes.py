"""Why workers cannot start what a run needs: who is given what meanwhile, what is told, and when the run ends with it."""

from __future__ import annotations

from typing import Any

import pytest
from core_world import FakeWorker, World
from rollout.model.item import ItemSpec, Key
from rollout.model.run import RunState
from rollout_coordinator.core import step as st
from rollout_coordinator.core.events import CannotStart, WorkerCauses, WorkerGone, WorkerSpawn, WorkerWaiting


def cause(run_id: str = "R", executor: str = "script", **more: Any) -> CannotStart:
    values: dict[str, Any] = {
        "limits": None, "code": "model_load_failed", "message": "no such model", "times": 1, "final": True,
        "retry_in": 4.0,
    }  # fmt: skip
    return CannotStart(run_id, executor, **(values | more))


def fails(worker: FakeWorker, *causes: CannotStart) -> st.Step:
    """It tells them, and gives back all it has."""
    step = worker.world.step(WorkerCauses(worker.session, list(causes)))
    if worker.held:
        worker.release(*worker.held, reason="engine_start")
    return step


def opened(n: int = 6, *names: str, **more: Any) -> World:
    w = World()
    for name in names or ("A",):
        w.worker(name)
    w.open()
    w.submit(n, **more)
    w.seal(n)
    return w


def test_a_worker_that_cannot_start_them_gets_no_items_before_its_next_try() -> None:
    w = opened(6, "A", "B")
    a, b = w.workers["A"], w.workers["B"]
    fails(a, cause(final=False))
    assert not a.held
    w.pass_time(3.5)
    assert not a.held and len(b.held) == 4
    w.pass_time(1.0)
    assert a.held, "it tries again"
    w.drain_all()
    assert w.view().state is RunState.COMPLETED


def test_a_cause_on_every_worker_ends_the_run_and_harms_no_item() -> None:
    w = opened(6, "A", "B")
    fails(w.workers["A"], cause(message="no such model at 0x7f001\n  File m.py"))
    w.pass_time(1.0)
    assert w.view().state is RunState.RUNNING
    fails(w.workers["B"], cause(message="no such model at 0x7e002\n  File m.py"))
    w.pass_time(1.0)
    view = w.view()
    assert view.state is RunState.FAILED
    reason = "executor 'script' cannot start on any of the 2 workers that could host it: no such model at 0x7f001"
    assert view.reason == f"{reason}\n  File m.py"
    assert [event["reason"] for event in w.events("run_failed")] == [reason], "a line"
    assert (view.failed, view.attempts, view.retried) == (0, 0, 0)
    assert [(c.workers, c.everywhere) for c in view.causes] == [(["A", "B"], True)]
    w.verb("continue")
    assert w.view().causes == []
    w.drain_all()
    assert (w.view().state, w.view().done) == (RunState.COMPLETED, 6)


def test_a_cause_that_may_go_away_ends_no_run() -> None:
    w = opened(6)
    fails(w.workers["A"], cause(final=False))
    w.pass_time(2.0)
    assert w.view().state is RunState.RUNNING
    (wait,) = w.view().waits
    assert (wait.reason, wait.impossible) == ("cannot_start", False)


def test_a_worker_without_the_cause_keeps_the_run_going_though_it_is_busy_with_another() -> None:
    w = opened(2)
    w.open("other")
    b = w.worker("B", credit=1)
    w.submit(1, "other")
    assert b.held
    fails(w.workers["A"], cause())
    w.pass_time(1.0)
    assert w.view().state is RunState.RUNNING


def test_a_worker_that_cannot_host_it_does_not_keep_the_run_going() -> None:
    w = World()
    a = w.worker("A", executors=("script",))
    w.worker("B", executors=("other",))
    w.open()
    w.submit(2)
    fails(a, cause())
    w.pass_time(1.0)
    assert w.view().state is RunState.FAILED
    assert "the only worker that could host it" in w.view().reason


def test_what_other_executors_of_a_run_do_is_done_before_it_ends() -> None:
    w = opened(6, specs=[ItemSpec(executor="script"), ItemSpec(executor="other")])
    a = w.workers["A"]
    w.step(WorkerCauses(a.session, [cause()]))
    info = a.info
    a.release(*[key for key in a.held if info[key][2].executor == "script"], reason="engine_start")
    while w.view().done < 3:
        assert w.view().state is RunState.RUNNING
        a.finish(*[key for key in a.held if info[key][2].executor == "other"])
        w.pass_time(0.5)
    w.pass_time(0.5)
    assert (w.view().state, w.view().done, w.view().failed) == (RunState.FAILED, 3, 0)


def test_a_cause_of_items_that_ask_for_much_holds_the_others_back_in_nothing() -> None:
    much = ItemSpec(resources=(("slots", 1.0), ("gpus", 2.0)))
    w = World()
    a = w.worker("A", capacity=(("slots", 4.0), ("gpus", 2.0)))
    w.open()
    w.submit(4, specs=[ItemSpec(), much])
    w.step(WorkerCauses(a.session, [cause(limits=(2, 0))]))
    a.release(*[key for key in a.held if a.info[key][2] == much], reason="engine_start")
    w.pass_time(1.0)
    a.finish()
    w.pass_time(1.0)
    assert (w.view().state, w.view().done) == (RunState.FAILED, 2)


def test_causes_are_shown_with_those_that_are_alike_as_one() -> None:
    w = opened(6, "A", "B", "C")
    fails(w.workers["A"], cause(message="no room: 12 MiB are free", times=2, final=False))
    fails(w.workers["B"], cause(message="no room: 97 MiB are free", final=False))
    (view,) = w.view().causes
    assert (view.executor, view.code, view.workers, view.hosts) == (
        "script", "model_load_failed", ["A", "B"], ["host-A", "host-B"],
    )  # fmt: skip
    assert (view.times, view.everywhere) == (3, False)
    fails(w.workers["C"], cause(message="another", final=False))
    assert [v.everywhere for v in w.view().causes] == [True, True]
    by_worker = {v.incarnation: [c.message for c in v.causes] for v in w.core.worker_views(w.now)}
    assert by_worker["B"] == ["no room: 97 MiB are free"]


def test_a_cause_that_ended_is_shown_no_more_and_the_worker_gets_items_at_once() -> None:
    w = opened(6)
    a = w.workers["A"]
    fails(a, cause(final=False, retry_in=60.0))
    assert not a.held
    w.step(WorkerCauses(a.session, []))
    assert a.held and w.view().causes == []


def test_it_is_told_once_in_the_log() -> None:
    w = opened(6)
    for times in (1, 2, 3):
        fails(w.workers["A"], cause(times=times, final=False))
    (told,) = w.events("worker_cannot_start")
    assert (told["worker"], told["code"], told["error"]) == ("A", "model_load_failed", "no such model")


def test_a_new_leader_learns_them_from_the_workers_and_ends_the_run_as_the_old_one_would_have() -> None:
    w = opened(6, "A", "B")
    fails(w.workers["A"], cause())
    w.restart()
    for worker in w.workers.values():
        worker.hello()
        fails(worker, cause())
    w.pass_time(1.0)
    assert w.view().state is RunState.FAILED


def test_a_worker_that_missed_the_end_of_a_run_is_told_when_it_speaks_of_it() -> None:
    w = opened(6)
    w.verb("kill")
    step = w.step(WorkerCauses(w.workers["A"].session, [cause()]))
    assert [s.run_id for s in step.sends if isinstance(s, st.SendRunEnded)] == ["R"]


def test_a_worker_that_comes_takes_a_run_up_that_nobody_else_can_start_yet() -> None:
    w = opened(6)
    fails(w.workers["A"], cause(final=False, retry_in=60.0))
    b = w.worker("B")
    assert b.held
    w.drain_all()
    assert w.view().state is RunState.COMPLETED


def test_what_comes_behind_it_in_a_chain_keeps_no_run_going() -> None:
    w = opened(4, specs=[ItemSpec(chain="c"), ItemSpec(executor="other", chain="c")])
    fails(w.workers["A"], cause())
    w.pass_time(1.0)
    assert w.view().state is RunState.FAILED


def busy_elsewhere() -> tuple[World, FakeWorker, FakeWorker]:
    """A cannot start it; B could, and holds nothing of it at the moment."""
    w = opened(6)
    a, b = w.workers["A"], w.worker("B", credit=0)
    fails(a, cause(retry_in=60.0))
    w.pass_time(1.0)
    assert w.view().state is RunState.RUNNING
    return w, a, b


def test_no_run_ends_for_a_worker_whose_stream_broke_a_moment_ago() -> None:
    w, _, b = busy_elsewhere()
    w.step(WorkerGone(b.session))
    w.pass_time(1.0)
    view = w.view()
    assert view.state is RunState.RUNNING and not view.causes[0].everywhere


def test_no_run_ends_because_the_worker_with_the_cause_comes_first_to_a_new_leader() -> None:
    w, a, b = busy_elsewhere()
    w.restart()
    a.hello()
    fails(a, cause())
    w.pass_time(1.0)
    assert w.view().state is RunState.RUNNING
    b.hello()
    w.pass_time(1.0)
    assert w.view().state is RunState.RUNNING


def test_a_run_ends_when_the_only_worker_without_the_cause_is_lost() -> None:
    w, _, b = busy_elsewhere()
    w.step(WorkerGone(b.session))
    b.silent = True
    w.pass_time(8.0)
    assert w.view().state is RunState.FAILED


def childless(w: World, **more: Any) -> FakeWorker:
    """Its parent waits for a child that no worker can start, and one more item of the parent's kind is pending."""
    a = w.worker("A", credit=4)
    w.open(**more)
    w.submit(1)
    parent = Key(w.root(), 0)
    a.start(parent)
    w.step(WorkerWaiting(a.session, parent, 1, 0))
    spec = ItemSpec(executor="engine")
    w.step(WorkerSpawn(a.session, parent, 1, 0, [b"c" * 32], [b"c"], (spec,), None, True))
    w.submit(1)
    w.seal(2)
    w.step(WorkerCauses(a.session, [cause(executor="engine")]))
    [child] = [key for key in a.held if a.info[key][2] == spec]
    a.release(child, reason="engine_start")
    return a


def test_a_parent_whose_child_nobody_can_start_ends_the_run_though_others_wait_for_what_it_holds() -> None:
    """What waits for the parent's process is no hope: the parent waits for the child."""
    w = World()
    a = childless(w)
    w.pass_time(1.0)
    assert w.view().state is RunState.RUNNING, "the other item may still run"
    [behind] = set(a.held) - {Key(w.root(), 0)}
    a.release(behind, reason="parent_waits")
    w.pass_time(1.0)
    assert w.view().state is RunState.FAILED and "cannot start" in w.view().reason


@pytest.mark.parametrize("what", ["the run's cap", "the parents of one worker"])
def test_it_ends_the_run_though_others_fit_that_may_not_begin_beside_it(what: str) -> None:
    """Simulated seed 1153: parents that wait take all places of the run's own items."""
    w = World(waiting_max=1) if what == "the parents of one worker" else World()
    a = childless(w, max_in_flight=1 if what == "the run's cap" else 0)
    assert set(a.held) == {Key(w.root(), 0)}
    w.pass_time(1.0)
    assert w.view().state is RunState.FAILED and "cannot start" in w.view().reason
