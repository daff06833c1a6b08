"""Order within a bounded window: prefixes stay together, long items begin early, nobody starves, engines stay full."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from core_world import FakeWorker, World
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout.model.item import ItemSpec

WIDTH = 4


def groups(count: int) -> list[ItemSpec]:
    return [ItemSpec(affinity=f"g{n}") for n in range(count)]


def affinities(worker: FakeWorker) -> list[str]:
    """In the order in which it was given them."""
    return [spec.affinity for _, _, spec, _ in worker.info.values()]


def changes(of: Sequence[str]) -> int:
    return sum(1 for before, after in pairwise(of) if before != after)


def test_rows_of_one_prefix_go_to_one_worker_one_after_the_other() -> None:
    w = World()
    a, b = w.worker("A", credit=4), w.worker("B", credit=4)
    w.open()
    w.submit(160, specs=groups(8))  # 20 of each, in turn
    w.seal(160)
    for _ in range(200):
        for worker in (a, b):
            if worker.held:
                worker.finish(next(iter(worker.held)))
        while a.revokes or b.revokes:
            (a if a.revokes else b).confirm()
    assert w.view().state.value == "completed"
    assert abs(len(a.info) - len(b.info)) <= 8, "one as many as the other"
    shared = set(affinities(a)) & set(affinities(b))
    assert len(shared) <= 2, "but at the very start and end"
    assert changes(affinities(a)) + changes(affinities(b)) <= 14, "160 rows of 8 prefixes in turn: 158 in input order"


def test_a_prefix_that_everybody_has_keeps_no_worker_idle() -> None:
    w = World()
    a, b = w.worker("A", credit=4), w.worker("B", credit=4)
    w.open()
    w.submit(100, specs=groups(1))
    for _ in range(10):
        assert len(a.held) == len(b.held) == 4
        a.finish(*list(a.held)[:1])
        b.finish(*list(b.held)[:3])


def test_rows_of_a_worker_that_is_gone_go_to_the_others() -> None:
    w = World()
    a, b = w.worker("A", credit=4), w.worker("B", credit=4)
    w.open()
    w.submit(40, specs=groups(4))
    w.seal(40)
    a.alive = False
    for _ in range(60):
        b.finish()
        w.pass_time(0.5)
        b.beat()
    assert w.view().state.value == "completed"


def test_long_items_begin_before_short_ones_ahead_of_them() -> None:
    w = World()
    a = w.worker("A", credit=4)
    w.open()
    w.submit(20)
    a.finish()
    w.submit(4, specs=[ItemSpec(cost=2), ItemSpec(), ItemSpec(cost=5), ItemSpec()])
    assert [seq for _, seq in a.held] == [4, 5, 6, 7], "given already"
    a.finish()
    assert [seq for _, seq in a.held] == [22, 20, 8, 9]


def test_an_items_resources_bound_what_is_preferred_too() -> None:
    w = World()
    a = w.worker("A", credit=8, capacity=(("slots", 2.0), ("gpus", 2.0)))
    w.open()
    w.submit(8, specs=[ItemSpec(resources=(("slots", 1.0), ("gpus", 1.0)), affinity="g", cost=1)])
    assert len(a.held) == 2


KINDS = [ItemSpec(), ItemSpec(affinity="a"), ItemSpec(affinity="b", cost=3), ItemSpec(cost=1), ItemSpec(affinity="c")]


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.integers(0, len(KINDS) - 1), min_size=30, max_size=120),
    ends=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), min_size=20, max_size=120),
    bound=st.integers(4, 24),
)
def test_nothing_is_overtaken_from_further_behind_than_the_bound(
    rows: list[int], ends: list[tuple[int, int]], bound: int
) -> None:
    w = World(reorder_items=bound, window_items=64)
    workers = [w.worker(name, credit=3) for name in "ABC"]
    w.open()
    w.submit(len(rows), specs=[KINDS[n] for n in rows])
    w.seal(len(rows))
    given: set[int] = {seq for worker in workers for _, seq in worker.info}
    cursor = 0
    for who, count in ends:
        worker = workers[who]
        while worker.revokes:
            worker.confirm()
        worker.finish(*list(worker.held)[:count])
        now = {seq for one in workers for _, seq in one.info}
        eldest = next((seq for seq in range(len(rows)) if seq not in now), len(rows))
        assert all(seq <= eldest + bound for seq in now - given)
        assert w.view().cursor >= cursor, "the cursor only moves on"
        given, cursor = now, w.view().cursor
    w.drain_all()
    assert w.view().state.value == "completed"
    assert sorted(w.ledger.results[w.root()]) == list(range(len(rows)))


def play(lengths: list[int], costs: list[int], width: int = WIDTH) -> tuple[int, int]:
    """(ticks until all is done, ticks in which a place was empty while rows waited in the other engine).

    Engines of `width` places: what they hold they run in the order in which it came; a tick is one token for all.
    """
    w = World()
    engines = [w.worker("A", credit=2 * width), w.worker("B", credit=2 * width)]
    w.open()
    w.submit(len(lengths), specs=[ItemSpec(cost=cost) for cost in costs])
    w.seal(len(lengths))
    left = dict(enumerate(lengths))
    ticks = starved = 0
    while left:
        ticks += 1
        w.pass_time(0.25)
        running = {one.name: list(one.held)[:width] for one in engines}
        for one in engines:
            begun = [k for k in running[one.name] if k not in one.started]
            if begun:
                one.start(*begun)
        waiting = sum(len(one.held) - len(running[one.name]) for one in engines)
        free = sum(width - len(running[one.name]) for one in engines)
        starved += min(free, waiting)
        for one in engines:
            ended = [k for k in running[one.name] if left[k[1]] <= 1]
            for _, seq in running[one.name]:
                left[seq] -= 1
            if ended:
                one.finish(*ended)
                for _, seq in ended:
                    del left[seq]
        while any(one.revokes for one in engines):
            for one in engines:
                while one.revokes:
                    one.confirm()
    return ticks, starved


def test_both_engines_stay_full_to_the_last_rows() -> None:
    lengths = [5 + (n * 7) % 20 for n in range(60)]
    ticks, starved = play(lengths, [0] * 60)
    assert starved == 0, "no place is empty while a row waits in the other engine"
    assert ticks <= sum(lengths) / (2 * WIDTH) + max(lengths), "as good as any list schedule"


def test_long_rows_at_the_end_of_the_input_do_not_run_alone() -> None:
    lengths = [6] * 64 + [60] * 4
    costs = [0] * 64 + [3] * 4
    ideal = sum(lengths) / (2 * WIDTH)
    in_order, _ = play(lengths, [0] * 68)
    longest_first, starved = play(lengths, costs)
    assert in_order >= 64 * 6 / (2 * WIDTH) + 60, "the long ones last, alone"
    assert longest_first <= ideal * 1.15 and starved == 0
