"""Items go to workers that host their executor, and what nobody hosts holds nothing else up.

The seeds that mix executors (`sim_mixed.py`) show it under faults; here are two plain stories and what the seeds meet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from rollout.model.item import ItemSpec
from rollout.model.run import Lane, RunState
from rollout_worker.placement import GIVE_BACK_S
from sim_executors import EXECUTORS, Behaviour
from sim_generate import generate, mixed
from sim_mixed import LATE, WITH_DEVICE
from sim_scenario import RunPlan, Scenario, WorkerPlan
from sim_tables import Tables
from sim_world import World
from simulate import run

JOINS_AT = 20.0
COORDINATORS = (("c0", 1.0), ("c1", 1.0))
SPECS = (ItemSpec(), ItemSpec(executor="tool"))


@contextmanager
def before_it_joins(workers: tuple[WorkerPlan, ...], items: list[tuple[Behaviour, int]]) -> Generator[Tables]:
    """The tables just before a worker joins that hosts `tool`, which no other does; then everything ends."""
    late = WorkerPlan(LATE, 2, "x", executors=("tool",), joins_at=JOINS_AT)
    plan = RunPlan("k0", tuple(items), SPECS)
    world = World(Scenario(1, (*workers, late), COORDINATORS, (plan,), (), ()))
    try:
        world.scheduler.run(JOINS_AT - 0.5)
        yield world.store.tables
        world.scheduler.run(JOINS_AT + 30.0)
        assert world.failure is None
        assert [row.state for row in world.store.tables.runs.values()] == [RunState.COMPLETED]
    finally:
        world.over = True
        world.scheduler.close()


@pytest.mark.parametrize("first", ["hosted", "not hosted"])
def test_items_whose_executor_is_there_do_not_wait_for_those_whose_is_not(first: str) -> None:
    """More of them than a core keeps in memory at once."""
    names = [0] * 30 + [1] * 30 if first == "hosted" else [1] * 30 + [0] * 30
    with before_it_joins((WorkerPlan("w0", 2, "x"),), [(Behaviour(20), name) for name in names]) as tables:
        assert set(tables.results[1]) == {seq for seq, name in enumerate(names) if name == 0}
        assert not [key for key in tables.last if names[key[1]] == 1], "given to nobody"


def test_a_parent_waits_for_children_that_nobody_hosts_and_holds_nothing_else_up() -> None:
    """Its worker has one slot, and the parents more than one worker could hold."""
    parents = [(Behaviour(20, children=2, calls="tool"), 0) for _ in range(12)]
    with before_it_joins((WorkerPlan("w0", 1, "x"),), [*parents, *[(Behaviour(20), 0) for _ in range(6)]]) as tables:
        assert set(tables.results[1]) == set(range(12, 18))


def test_a_parent_that_has_the_device_while_it_waits_goes_on_before_another_item_gets_it() -> None:
    """One worker with one device; the children want none, the other items run in processes of another executor."""
    items = tuple((Behaviour(20, children=2), 0) if n % 2 else (Behaviour(20), 1) for n in range(6))
    specs = tuple(ItemSpec(executor=name, resources=WITH_DEVICE) for name in ("tool", "slot"))
    worker = WorkerPlan("w0", 3, "x", executors=("slot", "tool"), devices=1)
    report = run(Scenario(2, (worker,), COORDINATORS, (RunPlan("k0", items, specs),), (), ()), steps_min=0)
    assert any("completed 6/6 done 6" in line for line in report.milestones)


@pytest.mark.parametrize("what", ["run's cap", "lane's cap", "credit", "credit, and they come first"])
def test_what_waits_for_the_device_of_a_parent_gives_its_places_up_for_it(what: str) -> None:
    """One worker with one device, which a parent has; the engine that the other items run in needs it too."""
    specs = (
        ItemSpec(executor="tool", resources=WITH_DEVICE, lane="a"),
        ItemSpec(executor="model", lane="a", priority=9 if what == "credit, and they come first" else 0),
    )
    parent, other = (Behaviour(400, children=2, calls="slot"), 0), (Behaviour(20), 1)
    plan = RunPlan("k0", (parent, *[other] * 12), specs)
    if what == "run's cap":
        plan = replace(plan, max_in_flight=2)
    elif what == "lane's cap":
        plan = replace(plan, lanes=(Lane("a", 1),))
    worker = WorkerPlan("w0", 1, "x", executors=("model", "slot", "tool"), devices=1)
    report = run(Scenario(2, (worker,), COORDINATORS, (plan,), (), ()), steps_min=0)
    assert any("completed 13/13 done 13" in line for line in report.milestones)
    assert report.seconds < 2 * GIVE_BACK_S


def test_the_seeds_mix_executors_in_every_way() -> None:
    seen: Counter[str] = Counter()
    for seed in filter(mixed, range(200)):
        scenario = generate(seed)
        hosted = {name for worker in scenario.workers if not worker.joins_at for name in worker.executors}
        asked = {spec.executor or run.kind for run in scenario.runs for spec in run.specs}
        calls = {(run.kind, how.calls or run.kind) for run in scenario.runs for how, _ in run.items if how.children}
        seen["items of a run name several executors"] += any(
            len({spec.executor or run.kind for spec in run.specs}) > 1 for run in scenario.runs
        )
        seen["a worker hosts some only"] += any(set(w.executors) != set(EXECUTORS) for w in scenario.workers)
        seen["a parent's children are another executor's"] += any(parent != child for parent, child in calls)
        seen["nobody hosts it until one joins"] += bool(asked - hosted)
        seen["items and engines want a worker's last device"] += any(w.devices == 1 for w in scenario.workers)
        seen["parents keep the only device under a cap"] += sum(w.devices for w in scenario.workers) == 1 and any(
            run.max_in_flight and any(how.children for how, _ in run.items) for run in scenario.runs
        )
        seen["that one is struck"] += any(fault.node == LATE for fault in scenario.faults)
    assert min(seen.values()) >= 3, seen
