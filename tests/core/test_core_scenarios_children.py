"""Scenarios of items that spawn others."""

from __future__ import annotations

from typing import Any

import pytest
from core_world import FakeWorker, World
from rollout.model.item import Blob, ItemSpec, Key
from rollout.model.run import RunState
from rollout.model.worker import Credit
from rollout_coordinator.core.events import (
    Keys,
    WorkerCredit,
    WorkerProgress,
    WorkerSpawn,
    WorkerWaiting,
)
from rollout_coordinator.core.results import GIVEN_BACK_S


def spawn_and_wait(w: World, worker: FakeWorker, parent: Key, children: int, payload: bytes = b"c") -> None:
    """The parent's first attempt begins, spawns that many and waits for them."""
    worker.start((parent.log, parent.seq))
    ids = [b"%032d" % i for i in range(children)]
    w.step(WorkerSpawn(worker.session, parent, 1, 0, ids, [payload] * children, (ItemSpec(),), None, True))
    w.step(WorkerWaiting(worker.session, parent, 1, 0))


def test_a_parent_that_works_on_keeps_its_slot_and_reads_as_children_end() -> None:
    w = World()
    a, b = w.worker("A", credit=1), w.worker("B", credit=1)
    w.open()
    w.submit(1)
    parent = Key(w.root(), 0)
    holder, other = (a, b) if parent in a.held else (b, a)
    holder.start((parent.log, parent.seq))
    w.step(WorkerSpawn(holder.session, parent, 1, 0, [b"c0", b"c1"], [b"x", b"y"], (ItemSpec(),), None, False))
    w.step(WorkerWaiting(holder.session, parent, 1, 0, holds=True))
    assert list(holder.held) == [parent] and len(other.held) == 1
    other.finish()
    other.finish()
    got: list[Any] = holder.children[parent]
    assert [s.results.data for s in got] == [[b"r0"], [b"r1"]] and not holder.resumed
    holder.finish()
    w.seal(1)
    assert w.view().state is RunState.COMPLETED


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
    got = a.children[parent]
    assert got[0].results.data == [b"r0", b"r1"]
    a.finish()
    w.seal(1)
    assert w.view().state is RunState.COMPLETED


def test_what_a_child_says_of_itself_does_not_hide_what_its_parent_says() -> None:
    w = World()
    a = w.worker("A", credit=2)
    w.open()
    w.submit(1)
    parent = Key(w.root(), 0)
    spawn_and_wait(w, a, parent, 1)
    child = next(key for key in a.held if key[0] != parent.log)

    def says(key: tuple[int, int], note: str) -> None:
        w.step(WorkerProgress(a.session, [Keys(key[0], [key[1]], [1])], note, b""))

    says(child, "setup")
    assert w.view().note == "setup"
    says((parent.log, parent.seq), "step 3")
    says(child, "verification")
    assert w.view().note == "step 3"


@pytest.mark.parametrize("name", ["gpus", "memory_mib"])
def test_a_parent_goes_on_with_what_its_process_has(name: str) -> None:
    """Another item was promised that meanwhile; it waits at the worker until the parent's process is done with it."""
    w = World()
    a = w.worker("A", capacity=(("slots", 2.0), (name, 1.0)))
    spec = ItemSpec(resources=(("slots", 1.0), (name, 1.0)))
    w.open()
    w.submit(2, specs=spec)
    parent, child = Key(w.root(), 0), (2, 0)
    spawn_and_wait(w, a, parent, 1)
    assert set(a.held) == {(1, 0), (1, 1), child}
    a.finish(child)
    assert a.resumed == [parent]


GPU = ItemSpec(executor="gpu", priority=1)


def gave_back(w: World) -> FakeWorker:
    """A worker that gave an item back. That waits there for what the parent (0) holds, and took the place of its child;
    other items like it wait as well, of higher priority than the child."""
    a = w.worker("A", credit=1)
    parent = w.parent()
    a.start(parent)
    w.step(WorkerWaiting(a.session, parent, 1, 0))
    w.submit(2, specs=GPU)
    w.step(WorkerSpawn(a.session, parent, 1, 0, [b"c" * 32], [b"c"], (ItemSpec(),), None, True))
    assert set(a.held) == {parent, (1, 1)}
    a.release((1, 1), reason="parent_waits")
    return a


def test_what_a_worker_gives_back_for_a_parent_comes_again_when_a_parent_has_ended() -> None:
    w = World()
    a = gave_back(w)
    assert set(a.held) == {(1, 0), (2, 0)}
    a.finish((2, 0))
    assert set(a.held) == {(1, 0)} and a.resumed == [Key(1, 0)]
    a.finish((1, 0))
    assert set(a.held) == {(1, 1)}


def test_what_a_worker_gives_back_for_a_parent_comes_again_after_a_while() -> None:
    w = World()
    a = gave_back(w)
    a.finish((2, 0))
    a.start((1, 0))
    w.step(WorkerCredit(a.session, Credit(2)))
    w.pass_time(GIVEN_BACK_S - 1.0)
    assert set(a.held) == {(1, 0)}
    (wait,) = w.view().waits
    assert (wait.reason, wait.items) == ("resources", 2) and "wait for their children" in wait.message
    w.pass_time(2.0)
    assert set(a.held) == {(1, 0), (1, 1)}


def test_what_a_worker_gives_back_for_a_parent_goes_to_others_and_is_not_stolen_for_it() -> None:
    w = World()
    a = gave_back(w)
    b = w.worker("B")
    assert set(b.held) == {(1, 1), (1, 2)}
    a.finish((2, 0))
    w.step(WorkerCredit(a.session, Credit(4)))
    w.pass_time(3.0)
    assert not b.revokes
    a.finish((1, 0))
    w.pass_time(0.5)
    assert b.revokes


def test_children_spawned_again_while_the_first_are_compared_are_made_once() -> None:
    w = World()
    a = w.worker("A")
    parent = w.parent()

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


def test_a_parent_is_looked_at_when_there_is_something_for_it() -> None:
    """And in no other step: thousands may wait."""
    w = World()
    a = w.worker("A", credit=8)
    parent = w.parent()
    a.start(parent)

    def looked_at() -> bool:
        return bool(w.core._state.reading)  # pyright: ignore[reportPrivateUsage]

    w.step(WorkerSpawn(a.session, parent, 1, 0, [b"%032d" % 0], [b"c"], (ItemSpec(),), None, False))
    w.step(WorkerWaiting(a.session, parent, 1, 0))
    assert not looked_at()
    a.finish(*[key for key in a.held if key != parent])
    got: list[Any] = a.children[parent]
    assert [s.results.data for s in got] == [[b"r0"]] and a.resumed == [parent]
    w.step(WorkerWaiting(a.session, parent, 1, 1))
    assert not looked_at() and len(a.resumed) == 1
    w.step(WorkerSpawn(a.session, parent, 1, 1, [], [], (ItemSpec(),), None, True))  # that was all: said while it waits
    assert got[-1].complete and a.resumed == [parent] * 2
    assert not looked_at()


def test_a_parent_that_is_done_ends_its_children() -> None:
    w = World()
    a, b = w.worker("A"), w.worker("B")
    w.open()
    w.submit(2)
    parent = Key(w.root(), 0)
    holder = a if parent in a.held else b
    ids = [b"%032d" % i for i in range(2)]
    w.step(WorkerSpawn(holder.session, parent, 1, 0, ids, [b"c"] * 2, (ItemSpec(),), None, True))
    child = next(n for n, row in w.ledger.logs.items() if row.parent_log)
    assert any(key[0] == child for key in [*a.held, *b.held])
    holder.finish(parent)
    assert not any(key[0] == child for key in [*a.held, *b.held])


def test_a_parent_that_waits_is_no_backlog_and_hides_none() -> None:
    """It counts once, as begun: what its worker has not begun is stolen, and its worker steals."""
    w = World()
    a = w.worker("A", credit=4)
    parent = w.parent()
    spawn_and_wait(w, a, parent, 3)
    kids = sorted(key for key in a.held if key[0] != parent.log)
    assert len(kids) == 3
    a.start(*kids[:2])
    thief = w.worker("B", credit=4)
    a.confirm()
    assert list(thief.held) == kids[2:]


def test_parents_that_wait_leave_their_workers_credit_to_the_children() -> None:
    """Else, once a worker's credit is full of them, nobody runs what they wait for."""
    for credit in (Credit(2, 1 << 20, (("R", 2),)), Credit(4, 100, ())):  # for its run; of bytes
        w = World()
        a = w.worker("A", credit=2)
        w.open()
        w.step(WorkerCredit(a.session, credit))
        w.submit(2, payload=b"p" * 50)
        parents = [Key(w.root(), 0), Key(w.root(), 1)]
        for parent in parents:
            spawn_and_wait(w, a, parent, 2, b"c" * 50)
        assert len([key for key in a.held if key not in parents]) == 2, "as much as the credit allows"
        w.seal(2)
        for _ in range(3):
            a.finish(*[key for key in a.held if key not in parents])
        assert a.resumed == parents
        a.finish()
        assert w.view().state is RunState.COMPLETED


def test_a_worker_whose_parent_waits_steals() -> None:
    w = World()
    a, b = w.worker("A", credit=4), w.worker("B", credit=4)
    parent = w.parent()
    home, other = (a, b) if parent in a.held else (b, a)
    home.start((parent.log, parent.seq))
    w.step(WorkerWaiting(home.session, parent, 1, 0))
    w.step(WorkerCredit(home.session, Credit(0, 1 << 20, ())))
    w.open("S")
    w.submit(4, run_id="S")
    assert len(other.held) == 4
    other.start(*sorted(other.held)[:2])
    w.step(WorkerCredit(home.session, Credit(4, 1 << 20, ())))
    other.confirm()
    assert len(home.held) == 2 and len(other.held) == 3


def test_a_child_has_not_waited_as_long_as_the_parents_beside_it() -> None:
    """Else two workers take it from each other for ever, each before the other can begin it."""
    w = World()
    a, b = w.worker("A", credit=4), w.worker("B", credit=4)
    w.open()
    w.submit(2)
    parents = {worker: Key(*next(iter(worker.held))[:2]) for worker in (a, b)}
    for worker, parent in parents.items():
        worker.start(parent)
        w.step(WorkerWaiting(worker.session, parent, 1, 0))
    w.pass_time(30.0)
    w.step(WorkerSpawn(a.session, parents[a], 1, 0, [b"%032d" % 7], [b"c"], (ItemSpec(),), None, True))
    w.pass_time(0.5)
    assert not a.revokes and not b.revokes
    w.pass_time(3.0)
    assert a.revokes or b.revokes, "now its worker has sat on it"


def test_a_parent_that_waits_has_begun_also_when_nobody_said_so() -> None:
    w = World()
    a = w.worker("A", credit=4)
    parent = w.parent()
    w.step(WorkerWaiting(a.session, parent, 1, 0))
    assert w.view().running == 1
    w.worker("B", credit=4)
    w.pass_time(3.0)
    assert not a.revokes


def test_parents_that_wait_are_bounded_where_their_children_cannot_run() -> None:
    """They hold no credit: without a bound of its own, one worker would begin a whole run of them at once."""
    w = World(waiting_max=4)
    a = w.worker("A", credit=2)
    w.open()
    w.submit(40)
    gpu = ItemSpec(require_roles=("gpu",))
    for _ in range(40):
        for key in [key for key in a.held if key not in a.started]:
            a.start(key)
            w.step(WorkerSpawn(a.session, Key(*key), 1, 0, [b"%032d" % key[1]], [b"c"], (gpu,), None, True))
            w.step(WorkerWaiting(a.session, Key(*key), 1, 0))
    parents = set(a.held)
    assert 4 <= len(parents) < 4 + 2, "the last assignment was made before the fourth waited"
    thief = w.worker("B", credit=2)  # whose own are few; what it gets is also what A would like to steal
    assert len(thief.held) == 2
    w.pass_time(3.0)
    assert not thief.revokes
    w.open("S")
    w.submit(2, run_id="S")
    assert set(a.held) - parents, "another run is none of its business"


def test_children_go_where_no_more_parents_are_begun() -> None:
    """Also those that come behind roots in the order of priority: else all parents wait for ever."""
    for cost in (0, 3):  # without and with an order of preference
        w = World(waiting_max=1, reorder_items=1)
        a = w.worker("A", credit=4)
        w.open()
        w.submit(1)
        parent = Key(w.root(), 0)
        a.start(parent)
        w.step(WorkerWaiting(a.session, parent, 1, 0))
        w.submit(20, specs=ItemSpec(priority=5, cost=cost))
        assert list(a.held) == [parent]
        ids = [b"%032d" % i for i in range(8)]
        w.step(WorkerSpawn(a.session, parent, 1, 0, ids, [b"c"] * 8, (ItemSpec(cost=cost),), None, True))
        w.seal(21)
        for _ in range(2):
            kids = [key for key in a.held if key[0] != parent.log]
            assert len(kids) == 4
            a.finish(*kids)
        assert a.resumed == [parent]
        a.finish(parent)
        while a.held:
            a.finish()
        assert w.view().state is RunState.COMPLETED


def test_a_parent_keeps_objects_for_its_children_until_it_has_a_result() -> None:
    """Whichever attempt does: an open child of the one before may name them. A new leader knows of it."""
    one, two, three = (bytes([n]) * 32 for n in (1, 2, 3))
    w = World()
    a = w.worker("A", credit=2)
    w.open()
    w.submit(1, specs=ItemSpec(max_worker_lost=5))
    parent = Key(w.root(), 0)

    def spawns(worker: FakeWorker, attempt: int, keeps: tuple[bytes, ...], lets_go: tuple[bytes, ...] = ()) -> None:
        worker.start((parent.log, parent.seq))
        payloads: list[Blob] = [b"c"]
        body = (worker.session, parent, attempt, 0, [b"%032d" % 0], payloads, (ItemSpec(),), None, False)
        w.step(WorkerSpawn(*body, keeps=keeps, lets_go=lets_go))

    spawns(a, 1, (one, two))
    spawns(a, 1, (three,), (one,))
    assert w.ledger.held == {parent: {two, three}}
    a.alive = False
    w.pass_time(8.0)
    w.restart()
    b = w.worker("B", credit=2)
    spawns(b, 2, (two,))
    spawns(a, 1, (), (two,))  # who lost it has no say
    assert w.ledger.held == {parent: {two, three}}
    b.finish((parent.log, parent.seq))
    assert not w.ledger.held and "holds" not in w.ledger.logs[parent.log].extra
