"""Many runs at once: a step costs what it hands out and not what is open, and together they fill a worker as one would."""

from __future__ import annotations

import pytest
from core_world import World
from rollout.model.run import RunSpec
from rollout.model.worker import Credit
from rollout_coordinator.core import dispatch
from rollout_coordinator.core.events import SubmitOpen, WorkerCredit
from rollout_worker.credit import CREDIT_MAX, CreditKeeper

RUNS = 200


class Looks:
    """How often dispatch asks whether a run may have more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        room = dispatch.free_credit

        def counted(*asked: object) -> int:
            self.count += 1
            return room(*asked)  # type: ignore[arg-type]

        monkeypatch.setattr(dispatch, "free_credit", counted)

    def since(self) -> int:
        count, self.count = self.count, 0
        return count


def many(own_credit: int = 0) -> World:
    """Two workers, full, of 200 runs that have more for them."""
    w = World()
    for name in ("A", "B"):
        worker = w.worker(name, credit=20)
        if own_credit:
            runs = tuple((f"R{n}", own_credit) for n in range(RUNS))
            w.step(WorkerCredit(worker.session, Credit(20, 1 << 20, runs)))
    for n in range(RUNS):
        w.open(f"R{n}")
        w.submit(5, f"R{n}")
    return w


def finish_one(w: World, name: str) -> None:
    worker = w.workers[name]
    worker.finish(next(iter(worker.held)))


def test_a_step_looks_at_the_runs_that_it_takes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    w = many()
    assert [len(worker.held) for worker in w.workers.values()] == [20, 20]
    looks = Looks(monkeypatch)
    for _ in range(50):
        finish_one(w, "A")
        assert looks.since() <= 5
    assert len(w.workers["A"].held) == 20


def test_a_full_worker_is_not_offered_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    w = many()
    looks = Looks(monkeypatch)
    for worker in w.workers.values():
        w.step(WorkerCredit(worker.session, Credit(20, 1 << 20)))
    w.ask(SubmitOpen, RunSpec("more", "script", b"{}"))
    w.submit(5, "more")
    assert looks.since() == 0


def test_a_worker_with_credit_for_each_run_is_full_when_all_of_them_are(monkeypatch: pytest.MonkeyPatch) -> None:
    w = many(own_credit=1)
    assert [len(worker.held) for worker in w.workers.values()] == [RUNS, RUNS]
    looks = Looks(monkeypatch)
    own = tuple((f"R{n}", 1) for n in range(RUNS))
    w.step(WorkerCredit(w.workers["A"].session, Credit(500, 1 << 20, own)))
    assert looks.since() == 0, "what it would take of other runs is no room for these"
    finish_one(w, "A")
    assert looks.since() <= 2 * RUNS and len(w.workers["A"].held) == RUNS


def test_a_worker_that_has_enough_of_one_run_takes_of_the_next() -> None:
    """At once, and not when it has ended something: that may take hours."""
    w = World()
    a = w.worker("A", credit=4)
    w.step(WorkerCredit(a.session, Credit(4, 1 << 20, (("R1", 6),))))
    w.open("R1")
    w.submit(20, "R1")
    assert len(a.held) == 6
    w.open("R2")
    w.submit(20, "R2")
    assert len(a.held) == 9, "half of the largest credit"
    w.open("R3")
    w.submit(20, "R3")
    assert len(a.held) == 10, "what is left of the credit that R2 and R3 have in common"


def test_who_takes_the_last_of_a_run_and_rests_is_asked_for_more_of_it() -> None:
    """The one that rested before it was full of that run too, while there was something of it."""
    w = World()
    a, b = w.worker("A", credit=1), w.worker("B", credit=1)
    w.step(WorkerCredit(a.session, Credit(1, 1 << 20, (("R3", 6),))))
    w.step(WorkerCredit(b.session, Credit(1, 1 << 20, (("R2", 6),))))
    w.open("R1")
    w.submit(20, "R1")
    w.open("R2")
    w.submit(1, "R2")
    assert (len(a.held), len(b.held)) == (1, 2)
    w.submit(1, "R2")
    assert (len(a.held), len(b.held)) == (1, 3)


def test_whoever_has_least_is_next() -> None:
    w = many()
    first = {key for worker in w.workers.values() for key in worker.held}
    for _ in range(20):
        finish_one(w, "A")
    given = {key for worker in w.workers.values() for key in worker.held} - first
    assert len({log for log, _ in given}) == 20 and not {log for log, _ in given} & {log for log, _ in first}


def test_runs_that_cannot_go_to_a_worker_do_not_lessen_what_others_may_have_there() -> None:
    w = World()
    a = w.worker("A", credit=8, executors=("script",))
    w.open("R1")
    w.submit(100, "R1")
    for n in range(6):
        w.open(f"other{n}", workload="none")
        w.submit(5, f"other{n}")
    w.step(WorkerCredit(a.session, Credit(8, 1 << 20, (("R1", 60),))))
    assert len(a.held) == 60


# ---- the worker's side


class Paces:
    """A worker whose credit is divided evenly; of each run so many end in a window, of what it holds."""

    def __init__(self, **ends: int) -> None:
        self.keeper = CreditKeeper(4, 1 << 20)
        self.ends = ends
        self.holds = dict.fromkeys(ends, 0)
        self.now = 0.0

    def window(self, most_of_all: int) -> None:
        """`most_of_all`: so many end, whatever is held."""
        credit = dict(self.keeper.current().run_items)
        largest = max([self.keeper.base, *credit.values()])
        room = self.keeper.base
        for run, ends in self.ends.items():
            share = max(1, largest // len(self.ends))
            own = credit.get(run)
            self.holds[run] = min(share, own if own is not None else room)
            if own is None:
                room -= self.holds[run]
            for _ in range(min(ends, 10 * self.holds[run], most_of_all // len(self.ends))):
                self.keeper.ended(run)
        self.now += 0.11
        self.keeper.adapt(self.now, lambda: self.holds)

    @property
    def held(self) -> int:
        return sum(self.holds.values())


@pytest.mark.parametrize("runs", [1, 2, 10, 30, 100])
def test_short_attempts_of_many_runs_are_held_as_those_of_one(runs: int) -> None:
    p = Paces(**{f"R{n}": 10_000 for n in range(runs)})
    for _ in range(20 + 2 * runs):  # here, a run a window finds its way into what they have in common
        p.window(1500)
    assert p.held >= 1500, "what ends in a window, at least"
    assert max(dict(p.keeper.current().run_items).values()) <= CREDIT_MAX


def test_long_attempts_beside_short_ones_do_not_pile_up() -> None:
    p = Paces(short=10_000, long=1)
    for _ in range(40):
        p.window(2000)
        assert p.holds["long"] <= 2 * p.keeper.base
    assert dict(p.keeper.current().run_items)["short"] >= 1000


def test_credit_falls_back_when_the_pace_of_all_runs_falls() -> None:
    p = Paces(**{f"R{n}": 10_000 for n in range(10)})
    for _ in range(20):
        p.window(1500)
    p.ends = dict.fromkeys(p.ends, 1)
    for _ in range(20):
        p.window(1500)
    assert p.held <= 8 * len(p.ends), "as of one run of which so many end in a window"
