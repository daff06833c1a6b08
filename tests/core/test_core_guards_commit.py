"""Each check of the core by itself: submitting, the cursor, policies, children, what a new leader believes."""

from __future__ import annotations

from typing import Any

import pytest
from core_world import FakeWorker, World
from rollout.model.errors import ConflictError, InputError, StateError
from rollout.model.item import Failure, ItemSpec, Key, Outcome
from rollout.model.run import Order, Policy, RunSpec, RunState
from rollout.model.worker import Credit
from rollout_coordinator.core import step as st
from rollout_coordinator.core.events import (
    Event,
    SubmitItems,
    SubmitOpen,
    SubmitSeal,
    WorkerCredit,
    WorkerSpawn,
    WorkerWaiting,
)

BAD = Failure("bad", "x", retryable=False)


def ids(first: int, n: int) -> list[bytes]:
    return [b"%032d" % (first + i) for i in range(n)]


def items(request: int, first: int, n: int) -> SubmitItems:
    return SubmitItems(request, "R", first, ids(first, n), [b"p"] * n, (ItemSpec(),))


# ---- submitting


def test_columns_that_disagree_are_refused_whole() -> None:
    w = World()
    w.open()
    for payloads, specs, index in (
        ([b"p"], (ItemSpec(),), None),
        ([b"p"] * 2, (), None),
        ([b"p"] * 2, (ItemSpec(),), [0]),
    ):
        reply = w.ask(SubmitItems, "R", 0, ids(0, 2), payloads, specs, index)
        assert isinstance(reply.error, InputError)
    assert w.view().submitted == 0 and not w.ledger.items


def test_a_sealed_run_takes_no_items() -> None:
    w = World()
    w.open()
    w.submit(2)
    w.seal(2)
    with pytest.raises(ConflictError, match="sealed"):
        w.submit(1)
    with pytest.raises(ConflictError, match="sealed"):
        w.submit(3, first=1)
    assert w.view().submitted == 2


def test_an_ended_run_takes_no_items() -> None:
    w = World()
    w.open()
    w.submit(2)
    w.verb("kill")
    with pytest.raises(StateError, match="resume"):
        w.submit(1)


def test_batches_and_the_seal_keep_their_order_while_the_first_is_compared() -> None:
    w = World()
    w.open()
    w.submit(3)
    w.hold_loads = True
    w.step(items(501, 0, 6))
    w.step(items(502, 6, 2))
    w.hold_loads = False
    w.pass_time(0.25)
    assert w.replies[501].error is None and w.replies[502].error is None
    w.hold_loads = True
    w.step(items(503, 4, 6))
    w.step(SubmitSeal(504, "R", 10))
    w.hold_loads = False
    w.pass_time(0.25)
    assert w.replies[503].error is None and w.replies[504].error is None
    assert w.view().sealed and w.view().submitted == 10


def test_a_run_waits_for_its_seal() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(2)
    a.finish()
    assert w.view().state is RunState.RUNNING
    w.submit(1)
    a.finish()
    w.seal(3)
    assert (w.view().state, w.view().done) == (RunState.COMPLETED, 3)


# ---- the cursor and the policies


def scheduled(*policies: Policy, n: int = 6, **spec: Any) -> tuple[World, FakeWorker, int]:
    w = World()
    a = w.worker("A", credit=20)
    w.open(policies=policies)
    w.submit(n, specs=ItemSpec(**{"max_attempts": 1, **spec}))
    return w, a, w.root()


def being_read() -> World:
    """Two failures were accepted under the last leader, the result before them under this one."""
    w, a, log = scheduled(Policy("stop_early", (("failures", "2"),)))
    a.finish((log, 1), (log, 2), failure=BAD)
    w.hold_loads = True
    w.restart()
    a.hello()
    a.finish((log, 0))
    return w


def test_policies_see_what_was_accepted_under_the_last_leader() -> None:
    w = being_read()
    assert w.view().cursor == 0, "what came before is still being read"
    w.hold_loads = False
    w.pass_time(0.25)
    assert w.view().state is RunState.FAILED


def test_a_run_that_ends_and_goes_on_while_they_are_read_misses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_coordinator.core.replay.PAGE", 1)
    w = being_read()
    for _ in range(2):
        w.step(w.ledger.answer(w.loads.pop(0)))
    w.verb("kill")
    w.verb("continue")
    w.hold_loads = False
    w.pass_time(0.25)
    assert w.view().state is RunState.FAILED


def test_nothing_is_committed_behind_the_result_that_ended_the_run() -> None:
    w, a, log = scheduled(Policy("end_run", (("on", "failed"),)))
    a.finish((log, 2), (log, 3))
    a.finish((log, 1), failure=BAD)
    a.finish((log, 0))
    assert (w.view().state, w.view().cursor) == (RunState.FAILED, 2)


def test_a_run_is_not_complete_while_items_are_to_be_appended() -> None:
    w, a, log = scheduled(Policy("append", (("on", "failed"),)), n=1)
    w.seal(1)
    w.hold_loads = True
    a.finish((log, 0), failure=BAD)
    assert w.view().state is RunState.RUNNING
    w.hold_loads = False
    w.pass_time(0.25)
    a.finish()
    assert (w.view().state, w.view().submitted, w.view().done) == (RunState.COMPLETED, 2, 1)


def test_a_pruned_lane_skips_what_is_behind_its_prune_point() -> None:
    w, a, log = scheduled(Policy("prune_lane", (("after", "2"),)), n=8, lane="l")
    w.step(WorkerCredit(a.session, Credit(0)))
    w.submit(3, specs=ItemSpec(lane="l", max_attempts=1))
    a.finish((log, 4))
    a.finish((log, 0), (log, 1), failure=BAD)
    assert w.view().lanes[0].pruned_at == 1
    assert w.ledger.results[log][4][1] is Outcome.SKIPPED, "accepted before: evidence only"
    a.finish((log, 2))
    assert w.ledger.results[log][2][1] is Outcome.SKIPPED, "came later"
    assert w.ledger.results[log][9][1] is Outcome.SKIPPED, "never ran"
    w.submit(1, specs=ItemSpec(lane="l", max_attempts=1))
    assert w.ledger.results[log][11][1] is Outcome.SKIPPED, "came after the decision"
    a.finish()
    w.seal(12)
    assert (w.view().state, w.view().failed, w.view().skipped, w.view().done) == (RunState.COMPLETED, 2, 10, 0)


def test_the_first_success_of_a_group_ends_the_others() -> None:
    w, a, log = scheduled(n=4, group="g")
    w.submit(1, specs=ItemSpec())
    a.finish((log, 1))
    a.finish((log, 0))
    assert set(a.held) == {(log, 4)}, "those in flight are cancelled"
    assert [w.ledger.results[log][n][1] for n in range(4)] == [
        Outcome.DONE, Outcome.SKIPPED, Outcome.CANCELLED, Outcome.CANCELLED,
    ]  # fmt: skip
    w.submit(1, specs=ItemSpec(group="g", max_attempts=1))
    assert w.ledger.results[log][5][1] is Outcome.CANCELLED
    a.finish()
    w.seal(6)
    assert w.view().state is RunState.COMPLETED


@pytest.mark.parametrize("order", list(Order))
def test_a_group_that_was_won_stays_won_under_the_next_leader(order: Order) -> None:
    w = World()
    a = w.worker("A", credit=8)
    w.open(order=order)
    w.submit(4, specs=[ItemSpec(), ItemSpec(group="g"), ItemSpec(group="g"), ItemSpec(group="g")])
    log = w.root()

    def next_leader() -> None:
        w.restart()
        a.hello()
        w.pass_time(0.25)

    a.finish((log, 1), (log, 2))  # in the order of the schedule neither is committed
    next_leader()
    a.finish((log, 0))
    assert not a.held, "what is in flight under the next leader is cancelled as well"
    assert [w.ledger.results[log][n][1] for n in (1, 2, 3)] == [
        Outcome.DONE, Outcome.SKIPPED, Outcome.CANCELLED,
    ]  # fmt: skip
    next_leader()
    w.submit(2, specs=[ItemSpec(group="g"), ItemSpec(group="h")])
    assert w.ledger.results[log][4][1] is Outcome.CANCELLED and list(a.held) == [(log, 5)]
    a.finish()
    w.seal(6)
    assert w.view().state is RunState.COMPLETED


def test_what_is_written_of_a_run_does_not_grow_with_its_groups() -> None:
    w = World()
    a = w.worker("A", credit=64)
    w.open()
    w.submit(200, specs=[ItemSpec(group=f"prompt-{n // 2}") for n in range(200)])
    while a.held:
        a.finish(min(a.held))
    assert (w.view().done, w.view().cancelled, w.ledger.logs[w.root()].extra) == (100, 100, "{}")


def test_a_pipelined_chain_runs_one_ahead_and_ends_with_what_it_stands_on() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(3, specs=ItemSpec(chain="c", pipelined=True))
    log = w.root()
    assert set(a.held) == {(log, 0), (log, 1)}
    a.finish((log, 0), failure=Failure("boom", "x"))
    assert not a.held, "the successor went with it"


def test_an_attempt_whose_worker_does_not_enforce_its_timeout_ends() -> None:
    w = World(orphan_grace=10.0)
    a = w.worker("A")
    w.open()
    w.submit(1, specs=ItemSpec(timeout_ms=1000, max_attempts=1))
    a.start()
    w.pass_time(11.5)
    assert a.held
    w.pass_time(1.0)
    assert not a.held and w.view().failed == 1


def test_a_result_for_a_log_that_was_never_opened_is_a_fault() -> None:
    w = World()
    a = w.worker("A")
    a.send({(9, 0): 1})
    assert w.events("worker_quarantined")


# ---- an answer of the ledger that comes too late


@pytest.mark.parametrize("late", ["before", "after", "last"])
def test_a_read_for_a_run_that_was_killed_and_continued_counts_for_nothing(late: str) -> None:
    w = World(window_items=4)
    a = w.worker("A", credit=2)
    w.open()
    w.submit(12)
    w.hold_loads = True
    a.finish()
    old = [w.ledger.answer(load) for load in w.loads]
    assert old
    w.loads.clear()
    w.verb("kill")
    if late == "before":
        w.step(*old)
    w.verb("continue")
    if late == "after":
        w.step(*old)
    w.hold_loads = False
    w.pass_time(0.25)
    if late == "last":
        w.step(*old)
    w.seal(12)
    w.drain_all()
    assert (w.view().state, w.view().done) == (RunState.COMPLETED, 12)


def test_an_ended_run_that_is_opened_again_is_the_one_on_disk() -> None:
    w = World(ended_on_disk=True)
    w.hold_loads = True
    w.requests += 1
    w.step(SubmitOpen(w.requests, RunSpec("R", "script", b"{}")))
    assert w.requests not in w.replies, "the ledger is asked first"
    assert [type(load) for load in w.loads] == [st.LoadRun]


# ---- children


def parent_of(w: World, n: int = 1) -> tuple[FakeWorker, Key]:
    a = w.worker("A")
    w.open()
    w.submit(n)
    return a, Key(w.root(), 0)


def spawned(session: str, parent: Key, attempt: int, first: int, n: int, seal: bool = False) -> WorkerSpawn:
    return WorkerSpawn(session, parent, attempt, first, ids(first, n), [b"c"] * n, (ItemSpec(),), None, seal)


def children(w: World) -> list[bytes]:
    logs = [n for n, row in w.ledger.logs.items() if row.parent_log]
    return [row[0] for n in logs for row in w.ledger.items.get(n, [])]


def test_an_attempt_that_was_taken_away_makes_no_children() -> None:
    w = World()
    a, parent = parent_of(w)
    a.release(parent)
    assert a.held[parent] == 2
    w.step(spawned(a.session, parent, 1, 0, 2))
    b = w.worker("B")
    w.step(spawned(b.session, parent, 2, 0, 2))
    assert children(w) == []
    w.step(spawned(a.session, parent, 2, 0, 2))
    assert children(w) == ids(0, 2)


def test_children_with_a_gap_fail_their_parent_and_not_its_worker() -> None:
    w = World()
    a, parent = parent_of(w)
    w.step(spawned(a.session, parent, 1, 3, 2))
    assert not w.events("worker_quarantined") and children(w) == []
    assert parent not in a.held and w.view().failed == 1


def test_a_parent_that_spawns_more_the_second_time_fails() -> None:
    w = World()
    a, parent = parent_of(w)
    w.step(spawned(a.session, parent, 1, 0, 2, seal=True))
    w.step(spawned(a.session, parent, 1, 2, 1))
    assert children(w) == ids(0, 2)
    assert w.ledger.results[parent.log][0][3].code == "spawn_conflict"


def test_children_are_not_sent_to_a_stream_that_has_ended() -> None:
    w = World()
    a, parent = parent_of(w)
    w.step(spawned(a.session, parent, 1, 0, 1, seal=True), WorkerWaiting(a.session, parent, 1, 0))
    old, inner, sends = a.session, w._step, []
    a.hello()

    def recorded(events: tuple[Event, ...]) -> st.Step:
        step = inner(events)
        sends.extend(step.sends)
        return step

    w._step = recorded
    (child,) = [k for k in a.held if k[0] != parent.log]
    a.finish(child)
    assert not a.children
    w.step(WorkerWaiting(a.session, parent, 1, 0))
    assert not [s for s in sends if getattr(s, "session", "") == old]
    assert a.children[parent][-1].complete and a.resumed == [parent]


def test_children_of_a_parent_that_is_done_do_not_run_after_a_restart() -> None:
    w = World()
    a, parent = parent_of(w, 2)
    w.step(WorkerCredit(a.session, Credit(2)))
    w.step(spawned(a.session, parent, 1, 0, 5))
    a.finish(parent)
    w.restart()
    a.hello()
    w.pass_time(3.0)
    assert not [k for k in a.held if k[0] != parent.log]
    w.drain_all()
    w.seal(2)
    assert w.view().state is RunState.COMPLETED


def test_arrival_order_gives_each_result_one_place() -> None:
    w = World()
    a = w.worker("A")
    w.open(order=Order.ARRIVAL)
    w.submit(4)
    log = w.root()
    a.finish((log, 2))
    a.finish((log, 0), (log, 3))
    w.restart()
    a.hello()
    a.finish()
    w.seal(4)
    assert (w.view().state, w.view().cursor) == (RunState.COMPLETED, 4)
