"""Each check of the core by itself: what may go to whom and when, steals, chains, the window over the ledger."""

from __future__ import annotations

from typing import Any

import pytest
from core_world import FakeWorker, World
from rollout.model.item import Failure, ItemSpec
from rollout.model.run import Policy, RunState
from rollout.model.worker import Credit
from rollout_coordinator.core import step as st
from rollout_coordinator.core.events import SubmitItems, WorkerBeat, WorkerCommand, WorkerCredit, WorkerGone


def steal(a_credit: int = 20, n: int = 20, **spec: Any) -> tuple[World, FakeWorker, FakeWorker]:
    """A worker with a backlog, and an idle one that came later."""
    w = World()
    a = w.worker("A", credit=a_credit)
    w.open()
    w.submit(n, specs=ItemSpec(**spec))
    return w, a, w.worker("B", credit=20)


# ---- workers


def test_a_draining_worker_gets_nothing_though_it_tells_credit() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    assert w.ask(WorkerCommand, "A", "drain").error is None
    w.step(WorkerCredit(a.session, Credit(4)))
    w.submit(2)
    assert not a.held


def test_a_worker_that_did_not_hear_that_it_must_drain_is_told_again() -> None:
    w = World()
    a = w.worker("A")

    def told(step: st.Step) -> list[st.SendControl]:
        return [send for send in step.sends if isinstance(send, st.SendControl)]

    def beat(state: str) -> st.Step:
        return w.step(WorkerBeat("A", "host-A", w.mono, state=state))

    assert not told(beat("ready"))
    assert w.ask(WorkerCommand, "A", "drain", "1500").error is None
    a.hello()
    assert told(beat("ready")) == [st.SendControl("A", "drain", "1500")]
    w.restart()
    a.hello()
    assert [send.verb for send in told(beat("ready"))] == ["drain"], "by the next leader too"
    assert not told(beat("draining"))


def test_a_fenced_worker_gets_nothing() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.step(WorkerBeat("A", "host-A", w.mono, state="fenced"))
    w.submit(2)
    assert not a.held
    w.step(WorkerBeat("A", "host-A", w.mono))
    assert len(a.held) == 2


def test_nothing_is_assigned_where_no_stream_is_open() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.step(WorkerGone(a.session))
    a.session = ""
    w.submit(2)
    assert w.view().in_flight == 0


def test_payloads_beyond_a_workers_bytes_wait() -> None:
    w = World()
    a = w.worker("A", credit=100)
    w.step(WorkerCredit(a.session, Credit(100, 1000)))
    w.open()
    w.submit(10, payload=b"x" * 400)
    assert len(a.held) == 2
    w.seal(10)
    w.drain_all()
    assert w.view().state is RunState.COMPLETED


def test_an_assignment_stays_below_the_limit_of_a_frame() -> None:
    w = World(assign_bytes_max=1000)
    w.worker("A", credit=100)
    w.open()
    step = w.step(SubmitItems(77, "R", 0, [b"%032d" % n for n in range(9)], [b"x" * 400] * 9, (ItemSpec(),)))
    frames = [sum(len(p) for g in s.groups for p in g.payloads) for s in step.sends if isinstance(s, st.SendAssign)]
    assert sum(frames) == 3600 and max(frames) <= 1000


@pytest.mark.parametrize(
    ("spec", "inventory"),
    [
        (ItemSpec(), {"executors": ("other",)}),
        (ItemSpec(require_roles=("gpu",)), {"roles": ("cpu",)}),
        (ItemSpec(require_labels=(("zone", "a"),)), {"labels": (("zone", "b"),)}),
        (ItemSpec(require_plugin="p"), {"plugins": ("q",)}),
        (ItemSpec(resources=(("slots", 3.0),)), {}),
    ],
    ids=["executor", "roles", "labels", "plugin", "slots"],
)
def test_an_item_waits_for_a_worker_that_has_what_it_requires(spec: ItemSpec, inventory: dict[str, Any]) -> None:
    w = World()
    a = w.worker("A", **inventory)
    w.open()
    w.submit(1, specs=spec)
    assert not a.held


def test_strict_resources_are_not_overcommitted() -> None:
    w = World()
    a = w.worker("A", credit=9, capacity=(("slots", 9.0), ("gpus", 2.0)))
    w.open()
    w.submit(5, specs=ItemSpec(resources=(("slots", 1.0), ("gpus", 1.0))))
    assert len(a.held) == 2


# ---- time


def test_an_item_waits_for_its_time() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(1, specs=ItemSpec(not_before_ms=w.wall + 5000))
    w.pass_time(4.5)
    assert not a.held
    w.pass_time(1.0)
    assert a.held


def test_a_backoff_outlives_the_leader() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(1, specs=ItemSpec(retry_backoff_ms=10_000))
    a.finish(failure=Failure("boom", "x"))
    w.restart()
    a.hello()
    w.pass_time(4.0)
    assert not a.held
    w.pass_time(7.0)
    assert a.held == {(w.root(), 0): 2}


def test_dispatch_does_not_run_far_ahead_of_a_straggler() -> None:
    w = World(commit_horizon=10)
    a = w.worker("A", credit=4)
    w.open(policies=(Policy("prune_lane", ()),))
    w.submit(40)
    while done := [k for k in a.held if k[1]]:
        a.finish(*done)
    assert list(a.held) == [(w.root(), 0)]
    assert max(w.ledger.results[w.root()]) == 9


# ---- chains


def test_a_chain_waits_for_its_failed_item_and_goes_on_in_order() -> None:
    w = World()
    a, b = w.worker("A"), w.worker("B")
    w.open()
    w.submit(3, specs=ItemSpec(chain="c"))
    holder = a if a.held else b
    assert sum(len(x.held) for x in (a, b)) == 1
    holder.finish(failure=Failure("boom", "x"))
    w.pass_time(0.25)
    assert not a.held and not b.held, "item 1 does not overtake the retry of item 0"
    w.seal(3)
    for _ in range(3):
        w.pass_time(3.0)
        w.drain_all()
    assert w.view().state is RunState.COMPLETED


def test_a_pipelined_item_goes_only_to_the_worker_of_its_predecessor() -> None:
    w = World()
    a, b = w.worker("A", credit=1), w.worker("B", credit=4)
    w.open()
    w.submit(2, specs=ItemSpec(chain="c", pipelined=True))
    assert not (a.held and b.held)


def test_a_pipelined_result_before_its_predecessors_is_dropped() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(2, specs=ItemSpec(chain="c", pipelined=True))
    log = w.root()
    a.finish((log, 1))
    assert w.view().done == 0 and 1 not in w.ledger.results.get(log, {})
    w.seal(2)
    w.drain_all()
    assert w.view().done == 2 and w.ledger.results[log][1][0] == 2


def test_a_chain_gets_its_predecessors_result_from_the_ledger() -> None:
    w = World()
    a = w.worker("A", credit=1)
    w.open()
    w.submit(2, specs=ItemSpec(chain="c"))
    w.verb("pause")
    a.finish()
    w.restart()
    w.verb("resume")
    a.hello()
    assert a.predecessors[w.root(), 1] == (0, 1, b"r0")


def test_an_adopted_attempt_keeps_its_chain_busy() -> None:
    w = World()
    a = w.worker("A", credit=1)
    w.open()
    w.submit(2, specs=ItemSpec(chain="c"))
    w.restart()
    b = w.worker("B")
    w.pass_time(3.0)
    assert not b.held and len(a.held) == 1


# ---- steals


def test_a_stolen_item_is_its_thiefs_only_when_its_victim_gave_it_up() -> None:
    _, a, thief = steal()
    assert a.revokes and not thief.held
    a.start(*list(a.held))
    a.confirm()
    assert not thief.held and len(a.held) == 20


def test_what_has_begun_is_not_asked_back() -> None:
    w = World()
    a = w.worker("A", credit=8)
    w.open()
    w.submit(8)
    started = sorted(a.held)[2:]
    a.start(*started)
    w.worker("B", credit=8)
    w.pass_time(2.0)
    (revoke,) = a.revokes
    assert not {(k.log, seq) for k in revoke.keys for seq in k.seq} & set(started)


def test_what_is_known_from_the_ledger_only_is_not_asked_back() -> None:
    w = World()
    a = w.worker("A", credit=8)
    w.open()
    w.submit(8)
    w.restart()
    a.held.clear()
    w.by_session.clear()
    thief = w.worker("B", credit=8)
    state = w.core._state.workers["A"]  # pyright: ignore[reportPrivateUsage]
    state.session = "A-reborn"  # a stream whose Hello has said nothing of these attempts
    w.pass_time(2.0)
    assert state.revoke is None and not thief.held


@pytest.mark.parametrize("spec", [{"chain": "c"}, {"require_roles": ("x",)}], ids=["chain", "fits"])
def test_what_a_thief_may_not_have_is_not_asked_for(spec: dict[str, Any]) -> None:
    def spec_of(n: int) -> ItemSpec:
        own: dict[str, Any] = {"chain": f"c{n}"} if "chain" in spec else {}
        return ItemSpec(**spec | own)

    w = World()
    a = w.worker("A", credit=20, roles=("x",))
    w.open()
    w.submit(6, specs=[spec_of(n) for n in range(6)])
    assert len(a.held) == 6
    w.worker("B", credit=20)
    w.pass_time(3.0)
    assert not a.revokes


def test_a_paused_run_is_not_stolen_from() -> None:
    w = World()
    a = w.worker("A", credit=20)
    w.open()
    w.submit(20)
    w.verb("pause")
    w.worker("B", credit=20)
    w.pass_time(2.0)
    assert len(a.held) == 20 and not a.revokes


def test_a_victim_is_asked_once_at_a_time() -> None:
    w, a, _ = steal()
    w.worker("C", credit=20)
    w.pass_time(2.0)
    assert len(a.revokes) == 1


# ---- the window


def pages(w: World, kind: type) -> list[Any]:
    """What the ledger answers now to the reads under way; they are taken out of the world's hands."""
    found = [load for load in w.loads if isinstance(load, kind)]
    w.loads = [load for load in w.loads if not isinstance(load, kind)]
    return [w.ledger.answer(load) for load in found]


def test_a_row_whose_result_came_while_it_was_read_does_not_run_again() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(8)
    w.hold_loads = True
    w.restart()
    (page,) = pages(w, st.LoadPending)
    a.hello()
    a.finish()
    w.step(page)
    w.hold_loads = False
    w.seal(8)
    w.drain_all()
    assert w.view().state is RunState.COMPLETED and w.view().attempts == 8


def test_a_row_read_by_itself_is_not_taken_again_from_its_page() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(8)
    w.hold_loads = True
    w.restart()
    (page,) = pages(w, st.LoadPending)
    a.held.clear()  # lost with its stream
    w.step(SubmitItems(55, "R", 8, [b"%032d" % 8], [b"p"], (ItemSpec(),)))
    w.step(WorkerCredit("none", Credit()))
    a.credit = Credit(0)
    a.hello()
    for answer in pages(w, st.LoadItems):
        w.step(answer)
    w.step(page)
    w.hold_loads = False
    w.pass_time(0.5)
    assert w.core.gauges()["window_items"] == 9
    w.step(WorkerCredit(a.session, Credit(4)))
    w.seal(9)
    w.drain_all()
    assert w.view().state is RunState.COMPLETED and w.view().done == 9


def test_rows_submitted_while_the_rest_was_read_are_not_forgotten() -> None:
    w = World(window_items=4)
    w.open()
    w.submit(6)
    a = w.worker("A", credit=0)
    w.hold_loads = True
    w.step(WorkerCredit(a.session, Credit(4)))
    a.finish()
    (page,) = pages(w, st.LoadPending)
    w.submit(3)
    w.step(page)
    w.hold_loads = False
    w.seal(9)
    w.drain_all()
    assert w.view().state is RunState.COMPLETED and w.view().done == 9


def test_fresh_rows_do_not_pass_rows_that_are_on_disk_only() -> None:
    w = World(window_items=10)
    a = w.worker("A", credit=0)
    w.open()
    w.submit(12)
    w.step(WorkerCredit(a.session, Credit(3)))
    w.submit(2)
    w.seal(14)
    w.drain_all()
    assert w.view().state is RunState.COMPLETED and w.view().done == 14
