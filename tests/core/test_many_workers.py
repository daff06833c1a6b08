"""Hundreds of workers: what they cannot run, or should leave to others, is not looked at by each of them anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from core_world import World
from rollout.model.item import ItemSpec
from rollout.model.worker import Credit
from rollout_coordinator.core import dispatch, fair_share, steal
from rollout_coordinator.core.events import Tick, WorkerCredit
from rollout_coordinator.core.fair_share import FairShare
from rollout_coordinator.core.state import SpecQueue

MANY = 40


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> Counter[str]:
    calls: Counter[str] = Counter()
    original: Callable[..., Any] = getattr(owner, name)

    def call(*asked: Any) -> Any:
        calls[name] += 1
        return original(*asked)

    monkeypatch.setattr(owner, name, call)
    return calls


def mixed() -> World:
    """GPU workers with a backlog, and as many others that are idle and can run none of it."""
    w = World()
    for n in range(MANY):
        w.worker(f"gpu{n:02}", credit=8, labels=(("kind", "gpu"),))
        w.worker(f"cpu{n:02}", credit=8, labels=(("kind", "cpu"),))
    w.open("R")
    w.submit(MANY * 10, specs=ItemSpec(require_labels=(("kind", "gpu"),)))
    assert [len(worker.held) for name, worker in w.workers.items() if name.startswith("gpu")] == [8] * MANY
    return w


def finish_one(w: World, name: str) -> None:
    worker = w.workers[name]
    worker.finish(next(iter(worker.held)))


def test_thieves_that_can_run_none_of_it_do_not_look_at_every_victim(monkeypatch: pytest.MonkeyPatch) -> None:
    w = mixed()
    calls = counted(monkeypatch, steal, "most_for")
    for n in range(MANY):
        finish_one(w, f"gpu{n:02}")
        assert calls["most_for"] <= 2 * MANY, "one looks at all victims, and the others do not"
        calls.clear()
    assert not any(worker.revokes for worker in w.workers.values())


def test_idle_workers_that_nothing_fits_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    w = mixed()
    calls = counted(monkeypatch, dispatch, "Frame")
    finish_one(w, "gpu00")
    assert calls["Frame"] <= 2


def test_workers_that_are_full_of_one_run_are_not_asked_with_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As engines are, which have credit for the run that they serve and some for any other."""
    w = World()
    for n in range(MANY):
        worker = w.worker(f"w{n:02}", credit=4)
        w.step(WorkerCredit(worker.session, Credit(4, 1 << 20, (("R", 6),))))
    w.open("R")
    w.submit(MANY * 10)
    w.open("elsewhere")
    w.submit(5, "elsewhere", specs=ItemSpec(require_labels=(("kind", "gpu"),)))
    calls = counted(monkeypatch, FairShare, "is_full")
    for n in range(MANY):
        finish_one(w, f"w{n:02}")
    assert calls["is_full"] <= 4 * MANY
    assert all(len(worker.held) == 6 for worker in w.workers.values())
    calls.clear()
    w.submit(MANY, "elsewhere")  # these may go anywhere
    assert calls["is_full"] >= MANY
    assert sum(len(worker.held) for worker in w.workers.values()) == MANY * 7
    state = w.core._state  # pyright: ignore[reportPrivateUsage]
    assert state.rested_for
    w.verb("kill", "R")
    w.verb("kill", "elsewhere")
    assert not state.rested_for and not state.parked, "nothing is kept of runs that are over"


def test_what_comes_one_by_one_goes_to_whoever_has_least() -> None:
    w = World()
    workers = [w.worker(f"w{n}", credit=8) for n in range(5)]
    w.open("R")
    for n in range(20):
        w.submit(1)
        assert max(len(worker.held) for worker in workers) == n // 5 + 1
    workers[3].finish()
    w.submit(3)
    assert [len(worker.held) for worker in workers] == [4, 4, 4, 3, 4]


def test_those_that_have_much_are_given_more_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come by a few hundred while a run is submitted: one to each of as many workers is as many messages."""
    w = World(window_items=200 * MANY)
    workers = [w.worker(f"w{n:02}", credit=128) for n in range(MANY)]
    w.open("R")
    frames = counted(monkeypatch, dispatch, "send")
    w.submit(MANY)
    assert frames["send"] == MANY and all(len(worker.held) == 1 for worker in workers), "all begin"
    for _ in range(127):
        w.submit(MANY)
    assert all(len(worker.held) == 128 for worker in workers)
    assert frames["send"] <= 16 * MANY


def test_workers_of_which_each_is_another_are_not_all_looked_at_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    w = World(window_items=200 * MANY)
    for n in range(MANY):
        w.worker(f"w{n:02}", credit=128, capacity=(("slots", 2.0), ("memory_mib", 1000.0 + n)))
    w.open("R")
    w.submit(4 * MANY)
    looks = counted(monkeypatch, fair_share, "wants")
    for _ in range(4):
        w.submit(MANY)
    assert looks["wants"] <= 4 * 3 * MANY


def test_a_host_of_its_own_makes_no_other_kind() -> None:
    w = World()
    one, other = w.worker("a", host="a", version="1"), w.worker("b", host="b", version="2")
    gpu = w.worker("c", host="a", version="1", labels=(("kind", "gpu"),))
    kinds = [w.core._state.workers[worker.name].kind for worker in (one, other, gpu)]  # pyright: ignore[reportPrivateUsage]
    assert kinds[0] == kinds[1] != kinds[2]


def test_every_thief_finds_the_victim_that_has_something_for_it() -> None:
    w = World()
    kinds = [f"k{n}" for n in range(12)]
    for kind in kinds:
        w.worker(f"{kind}-busy", credit=12, labels=(("kind", kind),))
    w.open("R")
    for kind in kinds:
        w.submit(12, specs=ItemSpec(require_labels=(("kind", kind),)))
    for worker in w.workers.values():
        worker.start(*list(worker.held)[:2])
    for kind in reversed(kinds):
        w.worker(f"{kind}-idle", credit=12, labels=(("kind", kind),))
    w.pass_time(1.0)
    w.step(Tick())
    asked = {name for name, worker in w.workers.items() if worker.revokes}
    assert asked == {f"{kind}-busy" for kind in kinds}
    for kind in kinds:
        w.workers[f"{kind}-busy"].confirm()
    assert all(w.workers[f"{kind}-idle"].held for kind in kinds)


def test_a_thief_asks_the_victim_with_the_largest_backlog() -> None:
    w = World()
    for n in range(5):
        w.worker(f"w{n}", credit=6 + 2 * n)
    w.open("R")
    w.submit(sum(6 + 2 * n for n in range(5)))
    for worker in w.workers.values():
        worker.start(*list(worker.held)[:1])
    w.worker("idle", credit=8)
    w.pass_time(1.0)
    assert [name for name, worker in w.workers.items() if worker.revokes] == ["w4"]


def test_prefixes_that_are_warm_elsewhere_are_set_aside_at_the_same_cost_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order that they must not pass is known without looking at all of them again."""
    prefixes = 200
    w = World(window_items=4096, reorder_items=4096)
    warm = [w.worker(f"warm{n}", credit=prefixes // 2) for n in range(5)]
    w.open("R")
    specs = tuple(ItemSpec(affinity=f"a{n}") for n in range(prefixes))
    w.submit(prefixes, specs=list(specs))
    for worker in warm:
        worker.finish()
    cold = [w.worker(f"cold{n}", credit=20) for n in range(5)]
    for worker in warm:
        w.step(WorkerCredit(worker.session, Credit(0)))
    w.core._state.ready.clear()  # pyright: ignore[reportPrivateUsage]
    for worker in (*cold, *warm):  # in this order they are served
        w.step(WorkerCredit(worker.session, worker.credit))
    calls = counted(monkeypatch, SpecQueue, "head")
    w.submit(prefixes, specs=list(specs))
    assert not any(worker.held for worker in cold) and sum(len(worker.held) for worker in warm) == prefixes
    assert calls["head"] <= 10 * prefixes * len(cold)
