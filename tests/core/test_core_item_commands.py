"""Rows that an operator ends, and limits that change while rows have no result."""

from __future__ import annotations

from typing import Any

import pytest
from core_world import FakeWorker, World
from rollout.model.errors import NotFoundError, StateError
from rollout.model.item import Failure, ItemLimits, ItemSpec, Outcome
from rollout.model.run import Order, RunState
from rollout_coordinator.core.events import ItemCancel, Keys, RunLimits, WorkerSpawn, WorkerStarted
from rollout_coordinator.core.step import RunConfigured, SendCancel

FAILED = Failure("bad", "x")


def cancel(w: World, *place: int, **more: Any) -> Exception | None:
    return w.ask(ItemCancel, "R", place, **more).error


def row(w: World, seq: int) -> tuple[Outcome, str]:
    _, outcome, _, failure = w.ledger.results[w.root()][seq]
    return outcome, failure.code


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("exclusive", [False, True])
def test_a_running_row_is_cancelled_and_its_late_result_loses(order: Order, exclusive: bool) -> None:
    w = World()
    a = w.worker("A")
    w.open(order=order)
    w.submit(2, specs=ItemSpec(exclusive=exclusive, fail_on_worker_lost=exclusive))
    w.seal(2)
    a.start()
    hangs = (w.root(), 0)
    a.deaf = True
    w.requests += 1
    step = w.step(ItemCancel(w.requests, "R", (0,), "it hangs", "operator on host h"))
    assert [(one.session, one.keys[0].seq) for one in step.sends if isinstance(one, SendCancel)] == [(a.session, [0])]
    assert row(w, 0) == (Outcome.CANCELLED, "cancelled")
    message = w.ledger.results[hangs[0]][0][3].message
    assert "operator on host h" in message and "it hangs" in message
    a.finish(hangs)
    assert row(w, 0) == (Outcome.CANCELLED, "cancelled") and w.view().stale == 1
    a.finish()
    view = w.view()
    assert (view.state, view.done, view.cancelled, view.in_flight) == (RunState.COMPLETED, 1, 1, 0)
    assert [fields["row"] for fields in w.events("item_cancelled")] == ["1"]


def test_pending_rows_are_cancelled_wherever_they_are() -> None:
    """In the queue, beyond the window, waiting for their next attempt, set aside for another worker."""
    w = World(window_items=4)
    a = w.worker("A", credit=1)
    w.open()
    w.submit(20, specs=ItemSpec(retry_backoff_ms=60_000, max_attempts=5))
    w.seal(20)
    a.finish(failure=FAILED)
    for seq in (0, 3, 19):
        assert cancel(w, seq) is None
    a.finish(failure=Failure("bad", "x", retry_after_ms=0))  # row 2 of them: it comes back at once
    w.pass_time(0.5)
    assert cancel(w, 1) is None
    w.restart()
    a.hello()
    assert cancel(w, 18) is None
    w.drain_all()
    w.pass_time(120.0)
    w.drain_all()
    view = w.view()
    assert (view.state, view.done, view.cancelled) == (RunState.COMPLETED, 15, 5)
    assert all(row(w, seq) == (Outcome.CANCELLED, "cancelled") for seq in (0, 1, 3, 18, 19))


def test_a_chain_goes_on_behind_a_cancelled_row() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(3, specs=ItemSpec(chain="c", retry_backoff_ms=600_000))
    w.seal(3)
    a.finish(failure=FAILED)
    w.pass_time(1.0)
    assert not a.held
    assert cancel(w, 0) is None
    assert list(a.held) == [(w.root(), 1)]
    assert cancel(w, 1) is None
    assert list(a.held) == [(w.root(), 2)]
    a.finish()
    assert (w.view().state, w.view().done, w.view().cancelled) == (RunState.COMPLETED, 1, 2)


def test_a_row_is_cancelled_while_the_ledger_is_asked_for_it() -> None:
    w = World()
    w.open()
    w.submit(3)
    w.seal(3)
    w.hold_loads = True
    for request, seq in ((101, 0), (102, 0), (103, 1)):
        w.step(ItemCancel(request, "R", (seq,)))
    a = w.worker("A")
    assert (w.root(), 1) in a.held
    w.hold_loads = False
    w.pass_time(0.25)
    assert w.replies[101].error is None and isinstance(w.replies[102].error, StateError)
    assert w.replies[103].error is None and (w.root(), 1) not in a.held
    a.finish()
    assert (w.view().state, w.view().cancelled) == (RunState.COMPLETED, 2)


def test_what_cannot_be_cancelled() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(2)
    a.finish((w.root(), 0))
    assert isinstance(cancel(w, 0), StateError), "it has its result"
    assert isinstance(cancel(w, 2), NotFoundError) and isinstance(cancel(w, 1, 0), NotFoundError)
    assert isinstance(w.ask(ItemCancel, "S", (0,)).error, NotFoundError)
    w.verb("kill")
    assert isinstance(cancel(w, 1), StateError)


def test_children_end_with_their_cancelled_parent() -> None:
    w = World()
    parent = w.parent()
    a = w.worker("A")
    a.start()
    w.step(WorkerSpawn(a.session, parent, 1, 0, [b"c" * 32, b"d" * 32], [b"x"] * 2, (ItemSpec(),), None, True))
    children = [key for key in a.held if key[0] != parent.log]
    assert len(children) == 2
    assert cancel(w, 0, 1) is None
    assert (children[0] in a.held, children[1] in a.held) == (True, False)
    assert cancel(w, 0) is None and not a.held
    w.seal(1)
    assert (w.view().state, w.view().cancelled) == (RunState.COMPLETED, 1)


# ---- limits


def hanging(exclusive: bool = False, **spec: Any) -> tuple[World, FakeWorker]:
    w = World(window_items=4)
    a = w.worker("A", credit=1)
    w.open()
    w.submit(10, specs=[ItemSpec(exclusive=exclusive, **spec), ItemSpec(executor="other")])
    w.seal(10)
    a.start()
    w.pass_time(50.0)
    assert list(a.held) == [(w.root(), 0)]
    return w, a


def limit(w: World, timeout_ms: int, max_attempts: int = 3) -> None:
    reply = w.ask(RunLimits, "R", b'{"limit": 1}', ItemLimits(timeout_ms, max_attempts, 3, 0))
    assert reply.error is None


def test_workers_hear_of_another_configuration() -> None:
    w, _ = hanging()
    w.requests += 1
    step = w.step(RunLimits(w.requests, "R", b'{"limit": 1}', ItemLimits(0, 3, 3, 0)))
    assert RunConfigured("R") in step.sends


def test_new_limits_hold_for_what_runs_and_for_what_comes() -> None:
    w, a = hanging()
    limit(w, 20_000, max_attempts=1)
    w.pass_time(1.0)
    assert row(w, 0) == (Outcome.FAILED, "timeout"), "it has run for longer already"
    w.restart()
    a.hello()
    w.drain_all()
    given = {seq: spec for (_, seq), (_, _, spec, _) in a.info.items() if seq}
    assert {seq: spec.timeout_ms for seq, spec in given.items()} == {n: (20_000, 0)[n % 2] for n in range(1, 10)}
    assert {spec.max_attempts for seq, spec in given.items() if seq % 2 == 0} == {1}
    assert w.view().state is RunState.COMPLETED and w.view().spec.config == b'{"limit": 1}'


def test_an_exclusive_attempt_over_its_new_limit_is_stopped_before_the_next() -> None:
    w, a = hanging(exclusive=True)
    a.deaf = True
    limit(w, 1000)
    w.pass_time(1.0)
    assert list(a.held.values()) == [1] and w.view().in_flight == 1, "not quarantined, and nothing overlaps"
    a.deaf = False
    a.release((w.root(), 0), reason="cancel")
    a.finish()
    assert a.held == {(w.root(), 0): 2}


def test_a_raised_limit_lets_what_runs_run() -> None:
    w, a = hanging(timeout_ms=100_000)
    limit(w, 500_000)
    w.pass_time(100.0)
    assert list(a.held.values()) == [1]
    w.verb("kill")
    limit(w, 7000)
    w.verb("continue")
    assert {spec.spec.timeout_ms for spec in w.ledger.specs.values() if not spec.spec.executor} == {7000}


def test_a_start_that_is_told_twice_in_one_message_counts_once() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(1)
    w.step(WorkerStarted(a.session, [Keys(w.root(), [0, 0, 0, 0], [1, 1, 1, 1])]))
    assert w.view().running == 1
    a.finish()
    assert w.view().running == 0
