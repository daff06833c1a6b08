"""What is counted of attempts and workers: what began, and who is there."""

from __future__ import annotations

import pytest
from core_world import FakeWorker, World
from rollout.model.item import INVALID, Failure, ItemSpec, Key
from rollout.model.run import RunState
from rollout_coordinator.core.events import WorkerSpawn


def running(items: int = 4, begun: int = 2) -> tuple[World, FakeWorker, int]:
    """Items with worker A, of which some have begun."""
    w = World()
    a = w.worker("A", credit=items)
    w.open()
    w.submit(items)
    a.start(*sorted(a.held)[:begun])
    return w, a, w.root()


def counts(w: World) -> tuple[int, int, int]:
    view = w.view()
    return view.attempts, view.retried, view.worker_lost


def test_what_is_given_back_before_it_began_is_no_attempt() -> None:
    w, a, log = running()
    a.release((log, 2), (log, 3))
    assert counts(w) == (0, 0, 0)
    a.release((log, 0))
    assert counts(w) == (1, 1, 0), "it had begun"
    w.drain_all()
    w.seal(4)
    w.drain_all()
    assert w.view().state is RunState.COMPLETED and counts(w) == (5, 1, 0)


def test_a_lost_worker_costs_the_attempts_that_had_begun() -> None:
    w, a, _ = running()
    a.alive = False
    w.pass_time(8.0)
    assert counts(w) == (2, 2, 2)
    ends = {seq: row.began_ms for (_, seq, _), row in w.ledger.attempts.items()}
    assert ends == {0: 1_000_000, 1: 1_000_000, 2: 0, 3: 0}


def test_a_failure_that_is_tried_again_is_a_retry() -> None:
    w, a, log = running()
    a.finish((log, 3), failure=Failure("again", "x"))
    assert counts(w) == (1, 1, 0), "also where its start was not told"
    a.finish((log, 0), failure=Failure("final", "x", False))
    assert counts(w) == (2, 1, 0)


def test_a_new_leader_counts_the_same() -> None:
    w, a, log = running()
    a.release((log, 0))
    a.finish((log, 1), failure=Failure(INVALID, "no row", False))
    a.finish((log, 2), failure=Failure("boom", "x", False))
    before = counts(w)
    w.restart()
    assert counts(w) == before == (3, 1, 0)
    assert (w.view().failed, w.view().invalid) == (2, 1)


def test_a_killed_run_counts_what_it_cut_off_as_tried_again_should_it_go_on() -> None:
    w, a, _ = running(begun=3)
    w.verb("kill")
    assert counts(w) == (3, 3, 0)
    w.verb("continue")
    a.start()
    a.finish()
    w.seal(4)
    assert w.view().state is RunState.COMPLETED
    assert counts(w) == (7, 3, 0), "4 results, and 3 that came to nothing"


def test_a_member_of_a_group_that_is_won_before_it_began_was_not_tried() -> None:
    w = World()
    a = w.worker("A", credit=2)
    w.open()
    w.submit(2, specs=ItemSpec(group="g"))
    log = w.root()
    a.start((log, 0))
    a.finish((log, 0))
    assert counts(w) == (1, 0, 0)
    assert (w.ledger.attempts[log, 1, 1].code, w.ledger.attempts[log, 1, 1].began_ms) == ("group_won", 0)


def test_workers_of_a_run_are_those_that_are_there() -> None:
    w, a, _ = running()
    assert w.view().workers == 1 and [one.incarnation for one in w.core.run_workers("R")] == ["A"]
    w.restart()
    assert w.view().in_flight == 4 and w.view().workers == 0, "nobody has said Hello to the new leader"
    w.worker("B")
    w.pass_time(4.0)
    assert w.view().workers == 0, "what the old one holds is nobody's work yet"
    a.hello()
    assert w.view().workers == 1


def test_a_worker_that_waits_for_its_next_batch_is_still_at_it() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(1)
    a.finish()
    assert w.view().in_flight == 0 and w.view().workers == 1
    w.pass_time(1.0)
    assert w.view().workers == 1
    w.pass_time(2.0)
    assert w.view().workers == 0


@pytest.mark.parametrize("verb", ["pause", "kill"])
def test_nobody_is_at_a_run_that_is_stopped(verb: str) -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(1)
    a.finish()
    w.verb(verb)
    assert w.view().workers == 0


def test_rates_are_of_the_last_half_minute() -> None:
    w = World()
    a = w.worker("A", credit=1)
    w.open()
    w.submit(100)
    assert w.view().rate == 0.0
    for _ in range(20):
        w.pass_time(0.5)
        a.finish()
    assert w.view().rate == pytest.approx(2.0, rel=0.15)
    w.pass_time(31.0)
    assert w.view().rate == 0.0
    w.verb("pause")
    a.finish()
    w.pass_time(2.0)
    assert w.view().rate == 0.0


def test_what_a_worker_has_in_hand() -> None:
    w, a, log = running(items=3, begun=1)
    parent = Key(log, 0)
    w.step(WorkerSpawn(a.session, parent, 1, 0, [b"c" * 32], [b"x"], (ItemSpec(),), None, True))
    b = w.worker("B")
    b.start()
    detail = w.core.worker_detail("A", 2)
    assert detail is not None and [(one.run_id, one.in_flight, one.running) for one in detail.runs] == [("R", 3, 1)]
    assert [(one.place, one.began_ms) for one in detail.held] == [((0,), 1_000_000), ((1,), 0)], "those that run first"
    child = w.core.worker_detail("B", 9)
    assert child is not None and [one.place for one in child.held] == [(0, 0)]
    assert w.core.worker_detail("C", 9) is None
    assert w.core.running(log, 0, 9) == [0] and w.core.running(log, 1, 9) == []
    assert [(one.place, one.worker) for one in w.core.in_flight(log, [2, 7])] == [((2,), "A")]


def test_the_time_in_which_nobody_worked_is_no_busy_time() -> None:
    w = World()
    w.open()
    w.submit(3)
    w.pass_time(20.0)  # nobody is there
    a = w.worker("A", credit=1)
    w.pass_time(10.0)
    a.finish()
    w.verb("pause")
    a.release(*list(a.held), reason="pause")
    w.pass_time(50.0)
    w.restart()
    w.pass_time(50.0)
    a.hello()
    w.verb("resume")
    w.pass_time(10.0)
    a.finish()
    w.restart()  # its worker is not back yet
    w.pass_time(4.0)
    a.hello()
    w.pass_time(2.0)
    w.seal(3)
    w.drain_all()
    view = w.view()
    assert view.state is RunState.COMPLETED and 21_000 <= view.busy_ms <= 24_000
