"""Exclusive attempts of workers that are not believed any more: their items wait for the worker's fence."""

from __future__ import annotations

import pytest
from core_world import FakeWorker, World
from rollout.model.item import Failure, ItemSpec
from rollout.model.run import RunState
from rollout.model.worker import Credit, WorkerState
from rollout_coordinator.core.core import Core
from rollout_coordinator.core.events import RunDelete, WorkerBeat, WorkerGoodbye, WorkerHello
from rollout_coordinator.core.settings import CoreSettings

EXCLUSIVE = ItemSpec(exclusive=True)
FENCED = 2 * CoreSettings().heartbeat_interval + CoreSettings().coordinator_failure_timeout


def lie(a: FakeWorker) -> None:
    a.send({(99, 0): 1})
    assert not a.session


def quarantined(spec: ItemSpec = EXCLUSIVE, **settings: float) -> tuple[World, FakeWorker, FakeWorker]:
    """A holds two exclusive items and a plain one and breaks the protocol; B stands by."""
    w = World(**settings)
    a = w.worker("A")
    w.open()
    w.submit(3, specs=[spec, spec, ItemSpec()])
    assert len(a.held) == 3
    b = w.worker("B")
    a.start((w.root(), 0))
    lie(a)
    return w, a, b


def state(w: World, name: str = "A") -> WorkerState:
    return w.core._state.workers[name].state  # pyright: ignore[reportPrivateUsage]


def test_exclusive_items_of_a_quarantined_worker_wait_for_its_fence() -> None:
    w, _, b = quarantined()
    log = w.root()
    assert b.held == {(log, 2): 2}, "what may overlap runs elsewhere at once"
    assert w.view().in_flight == 3
    w.pass_time(FENCED - 0.25)  # its process beats all the while
    assert b.held == {(log, 2): 2}
    w.pass_time(0.75)
    assert b.held == {(log, 0): 2, (log, 1): 2, (log, 2): 2}
    assert w.view().worker_lost == 1, "of the one that it had begun"
    w.seal(3)
    b.finish()
    assert w.view().state is RunState.COMPLETED


def test_the_wait_for_the_fence_counts_from_the_quarantine() -> None:
    """Its last word was longer ago than the wait has passed, for its item was late and it was silent."""
    w = World(orphan_grace=1.0)
    a = w.worker("A")
    w.open()
    w.submit(1, specs=ItemSpec(exclusive=True, timeout_ms=1000))
    a.start()
    a.deaf = True
    b = w.worker("B")
    a.silent = True
    w.pass_time(3.25)
    assert state(w) is WorkerState.QUARANTINED
    w.pass_time(FENCED - 0.5)
    assert not b.held
    w.pass_time(1.0)
    assert b.held


def test_no_beat_of_a_quarantined_worker_is_answered() -> None:
    w = World()
    a, b = w.worker("A"), w.worker("B")
    assert w.core.quarantine_error("A") is None and w.core.quarantine_error("nobody") is None
    lie(a)
    error = w.core.quarantine_error("A")
    assert error is not None and error.code == "protocol" and "never opened" in error.message
    assert w.core.quarantine_error("B") is None and b.session
    a.hello()
    assert not a.session, "nor is it welcomed"


def test_what_it_still_says_of_them_does_not_count() -> None:
    w, a, b = quarantined()
    session = w.core._state.sessions  # pyright: ignore[reportPrivateUsage]
    assert list(session) == [b.session]
    a.session = "A-s1"
    a.finish((w.root(), 0))
    assert w.view().done == 0 and w.view().in_flight == 3


def test_an_item_that_must_not_run_twice_fails_only_with_the_fence() -> None:
    w, _, b = quarantined(ItemSpec(exclusive=True, fail_on_worker_lost=True))
    assert w.view().failed == 0
    w.pass_time(FENCED + 0.5)
    assert w.view().failed == 1 and b.held == {(w.root(), 1): 2, (w.root(), 2): 2}


def test_a_stall_of_the_coordinator_is_no_time_for_the_fence() -> None:
    w, _, b = quarantined()
    w.mono += 30.0
    w.wall += 30_000
    w.pass_time(FENCED - 0.5)
    assert len(b.held) == 1
    w.pass_time(1.5)
    assert len(b.held) == 3


def test_a_new_leader_waits_for_it_too() -> None:
    w, a, b = quarantined()
    a.alive = False
    w.pass_time(2.0)
    w.restart()
    b.hello()
    w.pass_time(FENCED - 0.25)
    assert len(b.held) == 1
    w.pass_time(0.75)
    assert len(b.held) == 3


def test_a_new_leader_that_knows_of_the_quarantine_keeps_to_it() -> None:
    w, a, b = quarantined()
    w.pass_time(2.0)
    snapshot = w.ledger.snapshot()
    snapshot.workers = list(w.ledger.workers.values())
    w.core = Core.replay(w.settings, snapshot, w.now)
    a.hello()
    assert not a.session and w.core.quarantine_error("A") is not None
    b.hello()
    w.pass_time(FENCED - 0.25)
    assert len(b.held) == 1
    w.pass_time(0.75)
    assert len(b.held) == 3 and state(w) is WorkerState.QUARANTINED


def test_quarantine_is_not_forgotten_when_the_worker_keeps_silent() -> None:
    w, a, b = quarantined()
    b.alive = True
    w.pass_time(10 * w.settings.orphan_grace + FENCED + 1.0)
    a.hello()
    assert not a.session and state(w) is WorkerState.QUARANTINED


def test_a_worker_is_heard_on_its_own_host_only() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(2)
    honest = a.session
    assert len(a.held) == 2
    w.step(WorkerHello("stolen", "A", "host-B", a.inventory, a.credit, [], [], [], False))
    assert [(close.session, close.error.code) for close in w.closed] == [("stolen", "protocol")]
    assert a.session == honest and len(a.held) == 2
    a.finish()
    assert w.view().done == 2
    a.silent = True
    for _ in range(20):  # a beat from elsewhere keeps nobody alive
        w.pass_time(0.5)
        w.step(WorkerBeat("A", "host-B", w.mono))
    assert [e["worker"] for e in w.events("worker_failed")] == ["A"]


def test_a_new_leader_takes_the_host_of_a_worker_it_has_no_row_of_from_its_hello() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(2)
    snapshot = w.ledger.snapshot()
    snapshot.workers = []
    w.core = Core.replay(w.settings, snapshot, w.now)
    a.beat()
    a.hello()
    assert a.session and len(a.held) == 2
    w.step(WorkerHello("stolen", "A", "host-B", a.inventory, a.credit, [], [], [], False))
    assert a.session != "stolen" and len(a.held) == 2


def test_only_the_newest_quarantines_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_coordinator.core.workers.QUARANTINED_MAX", 2)
    w = World()
    for name in "ABC":
        lie(w.worker(name))
    assert sorted(w.core._state.workers) == ["B", "C"]  # pyright: ignore[reportPrivateUsage]


def test_caps_are_kept_while_they_wait() -> None:
    w = World()
    a = w.worker("A")
    w.open(max_in_flight=2)
    w.submit(4, specs=EXCLUSIVE)
    a.start()
    lie(a)
    b = w.worker("B")
    assert not b.held and w.view().in_flight == 2
    w.pass_time(FENCED + 0.5)
    assert len(b.held) == 2


def test_survivors_of_an_ended_run_wait_for_it_and_a_deleted_run_does_not() -> None:
    w, _, b = quarantined()
    w.verb("kill")
    assert {key[3] for key in w.view().survivors} == {"A"}
    w.verb("continue")
    w.pass_time(FENCED - 0.5)
    assert [key[1] for key in b.held] == [2]
    w.verb("kill")
    w.pass_time(1.0)
    assert w.view().survivors == () and w.view().in_flight == 0
    w, _, b = quarantined()
    assert w.ask(RunDelete, "R", force=True).error is None
    w.pass_time(FENCED + 0.5)
    assert w.core.gauges()["items_in_flight"] == 0


# ---- timeouts that are not enforced


def hangs(spec: ItemSpec, **settings: float) -> tuple[World, FakeWorker, FakeWorker]:
    """A runs an item of `spec` and another, beats, and does not stop what is late."""
    w = World(orphan_grace=10.0, **settings)
    a = w.worker("A")
    w.open()
    w.submit(2, specs=[spec, ItemSpec(exclusive=True)])
    a.start()
    a.deaf = True
    b = w.worker("B")
    return w, a, b


def test_an_exclusive_item_that_is_not_stopped_in_time_waits_for_its_workers_fence() -> None:
    w, _, b = hangs(ItemSpec(exclusive=True, timeout_ms=1000, max_attempts=3))
    w.pass_time(12.25)
    assert state(w) is WorkerState.QUARANTINED
    (told,) = w.events("worker_quarantined")
    assert told["reason"] == f"It did not end {w.root()}/0/1 within 12 s, a timeout."
    assert w.closed and not b.held and w.view().in_flight == 2
    w.pass_time(FENCED - 0.5)
    assert not b.held
    w.pass_time(1.0)
    assert b.held == {(w.root(), 0): 2, (w.root(), 1): 2}
    w.seal(2)
    b.finish()
    w.pass_time(30.0)
    assert w.view().state is RunState.COMPLETED and len(w.events("worker_quarantined")) == 1


@pytest.mark.parametrize("spec", [ItemSpec(timeout_ms=1000), ItemSpec(exclusive=True, timeout_ms=1000, max_attempts=1)])
def test_others_cost_nobody_his_standing(spec: ItemSpec) -> None:
    w, _, _ = hangs(spec)
    w.pass_time(12.5)
    assert state(w) is WorkerState.READY and w.view().in_flight == 1
    assert w.view().failed == (spec.max_attempts == 1)


def test_the_time_that_an_adopted_item_waits_at_its_worker_is_not_its_own() -> None:
    w = World(orphan_grace=10.0)
    a = w.worker("A")
    w.open()
    w.submit(2, specs=ItemSpec(exclusive=True, timeout_ms=1000))
    a.start((w.root(), 0))
    w.restart()
    a.hello()
    a.finish((w.root(), 0))
    w.pass_time(20.0)
    assert a.held and state(w) is WorkerState.READY
    a.start()
    w.pass_time(12.5)
    assert state(w) is WorkerState.QUARANTINED


# ---- Goodbye


def test_what_a_leaving_worker_could_not_stop_is_not_given_out_at_once() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(3, specs=[EXCLUSIVE, EXCLUSIVE, ItemSpec()])
    log = w.root()
    a.start((log, 0), (log, 2))
    b = w.worker("B")
    a.alive = False
    w.step(WorkerGoodbye(a.session, "drained"))
    assert b.held == {(log, 1): 2, (log, 2): 2}, "not begun, or not exclusive"
    w.pass_time(FENCED - 0.5)
    assert (log, 0) not in b.held
    w.pass_time(1.0)
    assert b.held[log, 0] == 2


# ---- what a fenced worker killed


@pytest.mark.parametrize("fail", [False, True])
def test_what_a_fenced_worker_killed_is_given_out_when_its_process_has_ended(fail: bool) -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(2, specs=ItemSpec(exclusive=True, fail_on_worker_lost=fail))
    log = w.root()
    a.start((log, 0))
    b = w.worker("B")
    a.hello()  # both are listed, one of them is being killed
    w.pass_time(30.0)
    assert not b.held and len(a.held) == 2, "however long that takes"
    a.credit = Credit(0)
    a.hello()
    a.release((log, 1), (log, 0), reason="self_fence")
    assert b.held == ({(log, 1): 2} if fail else {(log, 0): 2, (log, 1): 2})
    assert (w.view().failed, w.view().worker_lost) == (fail, fail)


def test_a_failure_is_judged_as_before() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(1, specs=ItemSpec(exclusive=True, max_attempts=2, retry_backoff_ms=1))
    for _ in range(2):
        a.finish(failure=Failure("boom", "x"))
        w.pass_time(0.5)
    assert w.view().failed == 1
