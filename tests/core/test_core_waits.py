"""What the pending items of a run wait for."""

from __future__ import annotations

from typing import Any

import pytest
from core_world import World
from rollout.cli.doctor.cluster import _of_run  # pyright: ignore[reportPrivateUsage]
from rollout.model.errors import InputError
from rollout.model.item import Failure, ItemSpec, Key
from rollout.model.run import Lane
from rollout_coordinator.core.events import WorkerGone, WorkerSpawn
from rollout_coordinator.runs_codec import status_to_wire


def waits(w: World) -> list[tuple[str, int, bool]]:
    return [(wait.reason, wait.items, wait.impossible) for wait in w.view().waits]


def said(w: World) -> str:
    (wait,) = w.view().waits
    return wait.message


def opened(*specs: ItemSpec, n: int = 3, credit: int = 2, run: dict[str, Any] | None = None, **inventory: Any) -> World:
    """A run with items of these specs, and worker A."""
    w = World()
    w.worker("A", credit=credit, **inventory)
    w.open(**run or {})
    w.submit(n, specs=list(specs) or ItemSpec())
    return w


def test_nobody_is_connected() -> None:
    w = World()
    w.open()
    w.submit(3)
    assert waits(w) == [("no_workers", 3, False)]
    a = w.worker("A", credit=8)
    assert waits(w) == []
    w.submit(8)
    w.step(WorkerGone(a.session))
    assert waits(w) == [("silent_worker", 8, False), ("no_workers", 3, False)], "whoever has no stream takes nothing"


def test_no_connected_worker_hosts_the_executor() -> None:
    w = opened(ItemSpec(executor="score"), executors=("script",))
    assert waits(w) == [("executor", 3, True)] and "'score'" in said(w)
    (wire,) = status_to_wire(w.view()).waits
    assert (wire.reason, wire.message, wire.items, wire.impossible) == ("executor", said(w), 3, True)
    w.worker("B", credit=8, executors=("score",))
    assert waits(w) == []


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ItemSpec(require_roles=("big",)), "role 'big'"),
        (ItemSpec(require_labels=(("zone", "b"),)), "label zone=b"),
        (ItemSpec(require_plugin="p"), "plugin 'p'"),
        (ItemSpec(resources=(("gpus", 4.0), ("slots", 1.0))), "4 gpus"),
        (ItemSpec(resources=(("slots", 3.0),)), "3 slots"),
    ],
)
def test_requirements_that_no_worker_meets(spec: ItemSpec, message: str) -> None:
    w = opened(spec, capacity=(("slots", 2.0), ("gpus", 2.0)), roles=("small",), labels=(("zone", "a"),))
    assert waits(w) == [("requirements", 3, True)]
    assert said(w) == f"no worker that hosts executor 'script' has {message}"


def test_requirements_that_no_worker_meets_together() -> None:
    w = opened(ItemSpec(require_roles=("r",), resources=(("gpus", 1.0),)), roles=("r",))
    w.worker("B", capacity=(("slots", 2.0), ("gpus", 1.0)))
    assert waits(w) == [("requirements", 3, True)] and "all of: role 'r', 1 gpus" in said(w)


def test_workers_that_are_busy() -> None:
    w = opened(n=5)
    assert waits(w) == [("credit", 3, False)]
    gpu = ItemSpec(resources=(("gpus", 1.0),))
    w = opened(gpu, n=5, credit=9, capacity=(("slots", 9.0), ("gpus", 2.0)))
    assert waits(w) == [("resources", 3, False)] and "1 gpus" in said(w)


def test_caps_of_a_lane_and_of_a_run() -> None:
    lane = opened(ItemSpec(lane="x"), n=5, credit=9, run={"lanes": (Lane("x", 2),)})
    assert waits(lane) == [("caps", 3, False)] and "lane 'x'" in said(lane)
    run = opened(n=5, credit=9, run={"max_in_flight": 1})
    assert waits(run) == [("caps", 4, False)] and "the run has 1" in said(run)


def test_a_run_on_one_worker_while_that_one_is_silent() -> None:
    w = opened(n=5, run={"one_worker": True})
    w.worker("B", credit=8)
    w.step(WorkerGone(w.workers["A"].session))
    assert waits(w) == [("one_worker", 3, False), ("silent_worker", 2, False)]


def test_chains_and_times() -> None:
    assert waits(opened(ItemSpec(chain="c"), credit=9)) == [("chain", 2, False)]
    w = opened(ItemSpec(not_before_ms=9_000_000), credit=9)
    assert waits(w) == [("not_before", 3, False)] and "1970-01-01T02:30:00+00:00" in said(w)
    w = opened(n=1, credit=9)
    w.workers["A"].finish(failure=Failure("bad", "x"))
    assert waits(w) == [("not_before", 1, False)]


def test_what_can_never_run_is_told_first_and_a_run_that_stands_still_is_not_looked_at() -> None:
    w = opened(ItemSpec(), ItemSpec(executor="score"), n=20, executors=("script",))
    assert waits(w) == [("executor", 10, True), ("credit", 8, False)]
    assert [view.waits for view in w.core.run_views()] == [[]]
    w.verb("pause")
    assert waits(w) == []


@pytest.mark.parametrize("name", ["two words", "a/b", "../x", "-x", "x" * 101, "a\nb"])
def test_an_executor_that_is_no_name_is_refused(name: str) -> None:
    w = World()
    w.open()
    with pytest.raises(InputError, match="is no name"):
        w.submit(2, specs=[ItemSpec(), ItemSpec(executor=name)])
    assert w.view().submitted == 0


def test_a_child_whose_executor_is_no_name_fails_its_parent_only() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(1)
    a.start()
    parent = Key(w.root(), 0)
    w.step(WorkerSpawn(a.session, parent, 1, 0, [b"c" * 32], [b"p"], (ItemSpec(executor="no name"),), None, True))
    assert w.view().failed == 1 and a.session and not w.closed


def test_what_a_silent_worker_has_waits_for_it_to_be_given_up() -> None:
    w = opened(n=2)
    a = w.workers["A"]
    w.step(WorkerGone(a.session))
    assert waits(w) == [("silent_worker", 2, False)] and "worker A on host-A" in said(w)
    a.silent = True
    w.pass_time(10.0)
    assert [reason for reason, *_ in waits(w)] == ["no_workers"]


def test_the_doctor_tells_what_a_run_waits_for_in_vain() -> None:
    w = opened(ItemSpec(executor="nobody"), executors=("script",))
    (found,) = _of_run(status_to_wire(w.view()))
    assert found.level == "warning" and "'nobody'" in found.text and "rollout-worker run" in found.remedy
    a = opened()
    assert list(_of_run(status_to_wire(a.view()))) == []
