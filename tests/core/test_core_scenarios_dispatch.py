"""Scenarios of dispatch: steals, lanes, chains, and runs that share workers."""

from __future__ import annotations

import pytest
from core_world import World
from rollout.model.item import NO_LIMIT, Failure, ItemSpec
from rollout.model.run import Lane, Policy, RunState
from rollout.model.worker import Credit
from rollout_coordinator.core.events import (
    WorkerCredit,
    WorkerGone,
)


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


def test_a_replica_whose_engine_starts_slowly_is_stolen_only_by_a_worker_without_one() -> None:
    w = World()
    a, b = w.worker("A"), w.worker("B")
    w.open()
    w.submit(2, specs=ItemSpec(max_worker_lost=NO_LIMIT))
    assert len(a.held) == len(b.held) == 1
    b.start(*b.held)
    w.pass_time(10.0)
    assert not a.revokes, "it would be B's second one, and the last for ever"
    c = w.worker("C")
    w.pass_time(0.5)
    a.confirm()
    assert len(c.held) == 1 and not a.held


def test_a_steal_does_not_outlive_its_victims_session() -> None:
    w = World()
    a = w.worker("A", credit=20)
    w.open()
    w.submit(20)
    w.worker("B", credit=20)
    w.step(WorkerGone(a.session))
    a.hello()
    assert a.revokes, "asked again on the new session"


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


def test_lane_caps_and_run_cap() -> None:
    w = World()
    a = w.worker("A", credit=50)
    w.open(lanes=(Lane("x", 2),), max_in_flight=5)
    w.submit(20, specs=[ItemSpec(lane="x"), ItemSpec()])
    assert sum(a.info[k][2].lane == "x" for k in a.held) == 2 and len(a.held) == 5
    w.seal(20)
    w.drain_all()
    assert w.view().state is RunState.COMPLETED


def test_dispatch_is_gated_by_run_lane_chain_and_pruning() -> None:
    """003, test 1: each constraint alone holds items back that the others would let go."""
    w = World()
    a = w.worker("A", credit=50)
    w.open(lanes=(Lane("x", 2),), max_in_flight=4, policies=(Policy("prune_lane", (("after", "1"),)),))
    x, chained = ItemSpec(lane="x", max_attempts=1), ItemSpec(lane="y", chain="c", max_attempts=1)

    def held() -> list[int]:
        return sorted(seq for _, seq in a.held)

    w.submit(6, specs=x)
    assert held() == [0, 1], "the lane's cap"
    w.submit(3, specs=chained)
    assert held() == [0, 1, 6], "one of a chain"
    w.submit(4, specs=ItemSpec(lane="z"))
    assert held() == [0, 1, 6, 9], "the run's cap"
    a.finish((w.root(), 0), failure=Failure("bad", "x", False))
    assert held() == [1, 6, 9, 10], "nothing more of a pruned lane; what is in flight of it goes on"
    a.finish((w.root(), 6))
    assert 7 in held(), "the chain goes on"


def test_a_run_is_on_one_worker_at_a_time_and_stays_there() -> None:
    w = World()
    workers = w.worker("A"), w.worker("B")
    w.open(one_worker=True)
    w.submit(12)
    holder, other = workers if workers[0].held else workers[::-1]
    w.pass_time(3.0)
    assert len(holder.held) == 4 and not other.held and not holder.revokes
    holder.finish()
    assert len(holder.held) == 4 and not other.held
    w.restart()
    other.hello()
    assert not other.held
    holder.alive = False
    w.pass_time(20.0)
    assert len(other.held) == 4
    w.seal(12)
    w.drain_all()
    assert w.view().state is RunState.COMPLETED


def test_a_run_on_one_worker_waits_for_that_one_between_its_items() -> None:
    w = World()
    workers = w.worker("A"), w.worker("B")
    w.open(one_worker=True)
    w.submit(1)
    holder, other = workers if workers[0].held else workers[::-1]
    w.open("S")
    w.submit(8, "S")  # keeps one of them busy
    for _ in range(5):
        holder.finish(*[key for key in holder.held if key[0] == w.root()])
        w.submit(1)
        assert not any(key[0] == w.root() for key in other.held)


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


def test_a_chain_goes_on_elsewhere_once_its_worker_had_its_time() -> None:
    """Nothing else happens meanwhile: that worker is busy, and the other one idle."""
    w = World()
    a, b = w.worker("A", credit=1), w.worker("B", credit=1)
    w.open()
    w.submit(2, specs=ItemSpec(chain="c"))
    holder, other = (a, b) if a.held else (b, a)
    w.submit(1, specs=ItemSpec(priority=1))  # to the other one
    w.submit(1, specs=ItemSpec(priority=1))  # to the holder, before the chain goes on
    holder.finish()
    other.finish()
    assert [seq for _, seq in holder.held] == [3] and not other.held
    w.pass_time(2.5)
    assert [seq for _, seq in other.held] == [1]


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_chain_of_two_executors_goes_from_worker_to_worker(pipelined: bool) -> None:
    w = World()
    a, b = w.worker("A", executors=("script",)), w.worker("B", executors=("tool",))
    w.open()
    w.submit(4, specs=[ItemSpec(chain="c", pipelined=pipelined, executor=name) for name in ("", "tool")])
    for n in range(4):
        holder, other = (b, a) if n % 2 else (a, b)
        assert [seq for _, seq in holder.held] == [n] and not other.held
        holder.finish()


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


def test_a_share_does_not_grow_with_the_credit_that_the_worker_has_for_the_run() -> None:
    w = World()
    a = w.worker("A", credit=8)
    w.open("R1")
    w.submit(100, "R1")
    w.open("R2", priority=1)
    w.submit(100, "R2")
    w.step(WorkerCredit(a.session, Credit(8, 1 << 20, (("R1", 60), ("R2", 48)))))
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
