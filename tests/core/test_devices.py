"""Accelerators leased to processes: never one to two, none lost, and idle engines give way."""

from __future__ import annotations

import os
import random

import pytest
from rollout.compute.port import Gpu, Host
from rollout.config.settings import WorkerSection
from rollout.model.errors import ConfigError, StateError
from rollout.model.item import NO_LIMIT, Failure, ItemSpec
from rollout.wire.v1 import work_pb2
from rollout_worker import session_events as ev
from rollout_worker.attempts import Plan
from rollout_worker.backends import environment
from rollout_worker.devices import DevicePool
from rollout_worker.executors.infer import InferExecutor
from rollout_worker.executors.port import Run
from rollout_worker.placement import FAIR_S, GIVE_BACK_S, UNLOAD_S, ChildState
from rollout_worker.processes.plans import planner
from rollout_worker.wiring import devices_to_lease
from session_world import LOG, RUN, Worker, delivered, of, seqs

OTHER = "01ARZ3NDEKTSV4RRFFQ69G5FAX"
FOUR = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")


def gpus(count: int) -> ItemSpec:
    return ItemSpec(resources=(("slots", 1.0), ("gpus", float(count))))


def engine_on(count: int) -> ItemSpec:
    """An engine of this name spreads over that many."""
    return ItemSpec(executor=f"engine-{count}")


def plan_run(run: Run) -> Plan:
    name, _, rest = run.executor.partition("-")
    count, _, how = rest.partition("-")
    kind = name if name in ("engine", "shared") else "slot"
    devices = 0 if kind == "shared" else int(count or 0)
    replicas = int(how[1:]) if how.startswith("x") else 1
    key = f"{run.run_id} {run.executor}"
    return Plan(run, kind, key, devices=devices, shares=how == "shared", replicas=replicas)


def worker(devices: tuple[str, ...] = FOUR, slots: int = 4, engines: int = 4) -> Worker:
    return Worker(slots=slots, max_engines=engines, devices=devices, self_fence_s=1e9, plan_run=plan_run)


def starts(actions: list[ev.Action]) -> dict[int, tuple[str, ...] | None]:
    return {a.child: a.devices for a in of(actions, ev.StartChild)}


def test_a_pool_gives_each_device_to_one() -> None:
    pool = DevicePool(FOUR)
    assert (pool.lease(1, 2), pool.lease(2, 1), pool.free) == (FOUR[:2], FOUR[2:3], 1)
    with pytest.raises(StateError):
        pool.lease(3, 2)
    pool.give_back(1)
    assert pool.lease(3, 3) == ("GPU-a", "GPU-b", "GPU-d")
    with pytest.raises(StateError):
        pool.lease(3, 0)


def test_a_process_gets_what_its_item_asks_for_and_no_other_sees_it() -> None:
    w = worker()
    assert starts(w.assign([0], spec=gpus(2))) == {1: FOUR[:2]}
    assert starts(w.assign([1])) == {2: ()}
    assert starts(w.assign([2], spec=gpus(1))) == {3: FOUR[2:3]}


def test_a_worker_that_does_not_know_its_devices_restricts_nobody() -> None:
    w = worker(devices=())
    assert starts(w.assign([0], spec=gpus(2))) == {1: None}
    assert starts(w.assign([1], spec=engine_on(2))) == {2: None}


def test_an_idle_engine_is_unloaded_at_once_where_nothing_else_runs() -> None:
    w = worker()
    w.assign([0], spec=engine_on(4))
    w.ready()
    assert not starts(w.assign([1], spec=gpus(1))), "the engine is in use"
    assert of(w.end(1, 0), ev.StopChild) == [ev.StopChild(1, kill=False)]
    assert starts(w.do(ev.ChildEnded(1, "it stopped"))) == {2: ("GPU-a",)}


def test_an_idle_engine_is_unloaded_after_a_grace_where_something_else_runs() -> None:
    w = worker()
    w.assign([0], spec=engine_on(4))
    w.ready()
    w.assign([1])
    w.ready()
    w.end(1, 0)
    assert not of(w.assign([2], spec=gpus(1)), ev.StopChild)
    assert not of(w.tick(UNLOAD_S - 0.1), ev.StopChild)
    assert of(w.tick(0.2), ev.StopChild) == [ev.StopChild(1, kill=False)]


def test_an_idle_slot_gives_way_to_an_engine() -> None:
    w = worker()
    w.assign([0], spec=gpus(1))
    w.ready()
    w.end(1, 0)
    assert of(w.assign([1], spec=engine_on(4)), ev.StopChild) == [ev.StopChild(1, kill=False)]
    assert starts(w.do(ev.ChildEnded(1, "it stopped"))) == {2: FOUR}


def test_no_process_is_ended_for_devices_that_would_not_suffice() -> None:
    w = worker()
    w.assign([0], spec=engine_on(2))
    w.assign([1], spec=gpus(1))
    w.ready()
    w.end(2, 1)
    assert not of(w.assign([2], spec=engine_on(3)), ev.StopChild), "the engine on two is in use"


def test_what_waits_for_a_device_ends_no_process_for_its_place() -> None:
    """The place is no use to it yet; a process that just came up for others would never get to run them."""
    w = worker(devices=("GPU-a",), slots=1)
    w.assign([0], spec=engine_on(1))
    w.ready()
    w.assign([1], spec=gpus(1))
    w.assign([2])
    assert delivered(w.ready()) == {2: [2]}


def test_what_waited_long_is_made_room_for_and_nobody_takes_it_away() -> None:
    w = worker()
    w.assign([0, 1], spec=gpus(2))
    w.ready()
    w.assign([2], spec=engine_on(4))
    w.assign(range(3, 9), spec=gpus(2))
    w.tick(FAIR_S + 0.1)
    w.tick(0.1)
    actions = w.end(1, 0)
    assert not delivered(actions), "though others of its kind wait"
    assert [a.child for a in of(actions, ev.StopChild)] == [1]
    assert not starts(w.do(ev.ChildEnded(1, "it stopped"))), "kept for the one that waits"
    w.end(2, 1)
    w.tick()
    (devices,) = starts(w.do(ev.ChildEnded(2, "it stopped"))).values()
    assert devices == FOUR


def test_more_devices_than_there_are_cost_no_attempt_and_are_told() -> None:
    w = worker()
    w.assign([0, 1, 2], spec=engine_on(5))
    (cause,) = w.session.causes.to_wire(lambda key: 0.0).causes
    assert (cause.code, cause.message) == ("devices_missing", "it needs 5 devices and this worker has 4")
    assert not w.session.unacknowledged and not w.session.held


def test_children_of_a_parent_that_waits_on_the_only_device_run_beside_it() -> None:
    w = worker(devices=("GPU-a",))
    w.assign([0], spec=gpus(1))
    w.ready()
    w.do(ev.ChildWaits(1, work_pb2.Waiting(log=LOG, seq=0, attempt=1)))
    assert delivered(w.assign([1], spec=gpus(1))) == {1: [1]}


def test_replicas_have_devices_of_their_own_and_share_the_rows() -> None:
    w = worker(engines=1, slots=1)
    spec = ItemSpec(executor="engine-2-x3")
    assert starts(w.assign(range(8), spec=spec)) == {1: FOUR[:2], 2: FOUR[2:]}, "a third has no devices"
    w.do(ev.ChildReady(1, 2, 2))
    given = delivered(w.actions)
    assert given == {1: [0, 1, 2, 3]}
    assert delivered(w.do(ev.ChildReady(2, 2, 2))) == {2: [4, 5, 6, 7]}
    assert w.session.credit.current().run_items == ((RUN, 8),)


def test_as_many_replicas_as_there_are_devices_for() -> None:
    w = worker(engines=1)
    assert list(starts(w.assign(range(8), spec=ItemSpec(executor="engine-1-x0")))) == [1, 2, 3, 4]
    assert list(starts(worker().assign(range(8), spec=ItemSpec(executor="engine-0-x0")))) == [1]


def test_replicas_are_no_more_than_rows_and_one_that_cannot_start_leaves_the_rows_to_the_others() -> None:
    w = worker()
    spec = ItemSpec(executor="engine-1-x3")
    assert list(starts(w.assign([0, 1], spec=spec))) == [1, 2]
    w.do(ev.ChildFailed(2, Failure("out_of_device_memory", "no", True)))
    assert delivered(w.do(ev.ChildReady(1, 4))) == {1: [0, 1]}


def test_an_idle_replica_is_given_what_waits_in_another() -> None:
    w = worker()
    spec = ItemSpec(executor="engine-1-x2")
    w.assign(range(6), spec=spec)
    w.do(ev.ChildReady(1, 2, 4))
    w.do(ev.ChildReady(2, 2, 4))
    recalled = of(w.tick(), ev.RecallIn)
    assert [(one.child, [key.seq for key in one.keys]) for one in recalled] == [(1, [4, 5])]


def test_endless_attempts_spread_over_the_replicas() -> None:
    w = worker()
    spec = ItemSpec(executor="engine-1-x2", max_worker_lost=NO_LIMIT)
    w.assign([0], spec=spec)
    assert delivered(w.do(ev.ChildReady(1, 8))) == {1: [0]}
    assert list(starts(w.assign([1, 2], spec=spec))) == [2]
    assert delivered(w.do(ev.ChildReady(2, 8))) == {1: [2], 2: [1]}


def test_what_holds_no_model_takes_no_engines_place() -> None:
    """Trials wait in their process for what an engine of the same worker says."""
    w = worker(engines=1)
    w.assign([0], spec=ItemSpec(executor="shared-1"))
    w.ready(4)
    waits(w, 1, 0)
    assert list(starts(w.assign([1], spec=engine_on(1)))) == [2]
    assert list(starts(w.assign([2], spec=ItemSpec(executor="shared-2")))) == [3]


def waits(w: Worker, child: int, seq: int) -> list[ev.Action]:
    return w.do(ev.ChildWaits(child, work_pb2.Waiting(log=LOG, seq=seq, attempt=1)))


def given_back(w: Worker) -> list[tuple[str, list[int]]]:
    w.flush()
    return [(f.released.reason, seqs(f.released.keys)) for f in w.sent(w.actions) if f.HasField("released")]


def test_what_needs_the_device_of_a_parent_that_waits_long_goes_back() -> None:
    """The children may need the places that it takes; what needs no device, or has a process, stays."""
    w = worker(devices=("GPU-a", "GPU-b"), slots=1)
    w.assign([0], spec=gpus(1))
    w.ready()
    waits(w, 1, 0)
    w.assign([1], spec=engine_on(1))
    w.ready()
    w.assign([2], spec=engine_on(1))
    w.assign([3, 4], spec=engine_on(2))
    w.tick()
    w.tick(GIVE_BACK_S - 0.1)
    assert given_back(w) == []
    w.tick(0.2)
    assert given_back(w) == [("parent_waits", [3, 4])]
    assert w.session.backlog == 3
    w.assign([5], spec=engine_on(2))
    w.tick(1.0)
    assert given_back(w)[1:] == [("parent_waits", [5])]


def test_what_can_have_the_device_when_others_are_done_waits_on() -> None:
    w = worker(devices=("GPU-a", "GPU-b"))
    w.assign([0], spec=gpus(1))
    w.ready()
    waits(w, 1, 0)
    w.assign([1], spec=engine_on(1))
    w.ready()
    w.assign([2], spec=ItemSpec(executor="other-1"))
    w.tick()
    w.tick(GIVE_BACK_S + 1.0)
    assert given_back(w) == []


def test_what_needs_the_place_of_an_engine_where_a_parent_waits_long_goes_back() -> None:
    w = worker(engines=1)
    w.assign([0], spec=engine_on(1))
    w.ready()
    waits(w, 1, 0)
    w.assign([1], spec=engine_on(2), run=OTHER)
    w.tick()
    w.tick(GIVE_BACK_S)
    assert given_back(w) == [("parent_waits", [1])]
    assert starts(w.assign([2], spec=engine_on(3))), "children of the parent may need an engine of their own"


def test_an_engine_has_the_devices_of_its_run_by_turns() -> None:
    w = worker(devices=("GPU-a",), engines=1)
    w.assign([0], spec=engine_on(1))
    w.ready()
    waits(w, 1, 0)
    assert starts(w.assign([1], spec=ItemSpec(executor="engine-1-shared"))) == {2: ("GPU-a",)}
    w.ready()
    w.end(2, 1)
    w.down(resume=work_pb2.Resume(log=LOG, seq=0, attempt=1))
    assert not of(w.end(1, 0), ev.StopChild)
    w.do(ev.ChildEnded(1, "it stopped"))
    assert of(w.tick(), ev.StopChild) == [ev.StopChild(2, kill=False)]


def test_an_engine_that_would_share_has_devices_of_its_own_where_nobody_lends() -> None:
    w = worker(devices=("GPU-a",), engines=1)
    assert starts(w.assign([1], spec=ItemSpec(executor="engine-1-shared"))) == {1: ("GPU-a",)}


def test_an_engine_that_makes_room_takes_the_children_of_its_parents_first() -> None:
    """Else it would never be done."""
    w = worker(engines=1)
    w.assign([0], spec=engine_on(1))
    w.ready()
    w.assign([1], spec=engine_on(2), run=OTHER)
    w.tick(FAIR_S)
    waits(w, 1, 0)
    assert delivered(w.assign([2], spec=engine_on(1))) == {1: [2]}
    w.end(1, 2)
    w.down(resume=work_pb2.Resume(log=LOG, seq=0, attempt=1))
    assert of(w.end(1, 0), ev.StopChild) == [ev.StopChild(1, kill=False)]


def test_children_of_another_executor_find_a_place_beside_all_parents_that_wait() -> None:
    """They cannot share a parent's process, as those of its own executor can."""
    w = worker(slots=1)
    for seq in (0, 1):
        w.assign([seq], spec=ItemSpec(executor="parent"))
        w.ready()
        w.do(ev.ChildWaits(seq + 1, work_pb2.Waiting(log=LOG, seq=seq, attempt=1)))
    assert starts(w.assign([2], spec=ItemSpec(executor="child"))) == {3: ()}
    assert delivered(w.ready()) == {3: [2]}
    assert not starts(w.assign([3], spec=ItemSpec(executor="other"))), "no more work at once than there are slots"


def backend(**options: object) -> Run:
    return Run(RUN, "infer", {"model": {"uri": "m"}, "backend": options})


@pytest.mark.parametrize(
    ("run", "count"),
    [
        (backend(kind="vllm", tensor_parallel_size=4), 4),
        (backend(kind="vllm"), 1),
        (backend(kind="vllm", device="cpu", tensor_parallel_size=4), 0),
        (backend(kind="transformers", tensor_parallel_size=4), 1),
        (backend(kind="mock"), 0),
    ],
)
def test_how_many_devices_an_inference_engine_wants(run: Run, count: int) -> None:
    assert planner({"infer": InferExecutor})(run).devices == count


def test_an_engine_that_reads_numbers_is_given_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = (Gpu(0, "x", 1, "GPU-a"), Gpu(1, "x", 1, "GPU-b"))
    monkeypatch.setattr(environment, "nvidia_gpus", lambda: found)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    for listed, order, expected in [
        ("0,1", None, "0,1"),
        ("GPU-z", None, "GPU-z"),
        ("GPU-b,GPU-a", "PCI_BUS_ID", "1,0"),
    ]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        environment.number_devices()
        assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("CUDA_DEVICE_ORDER")) == (expected, order)
    monkeypatch.delenv("CUDA_DEVICE_ORDER")


def test_which_devices_a_worker_leases() -> None:
    host = Host(1, 1, (Gpu(0, "x", 1, "GPU-a"), Gpu(1, "x", 1)))
    assert devices_to_lease(WorkerSection(), host) == ("GPU-a", "1")
    assert devices_to_lease(WorkerSection(devices=["fake"]), host) == ("fake",)
    with pytest.raises(ConfigError, match="names 1 twice"):
        devices_to_lease(WorkerSection(devices=["1", "1"]), host)
    with pytest.raises(ConfigError, match=r"\[worker.capacity\] gpus = 3, but this worker has 2 devices"):
        devices_to_lease(WorkerSection(capacity={"gpus": 3}), host)
    assert devices_to_lease(WorkerSection(capacity={"gpus": 3}), Host(1, 1)) == (), "counted only, as declared"


@pytest.mark.parametrize("seed", range(8))
def test_no_device_is_given_twice_and_none_leaks(seed: int) -> None:
    """1,000 random steps; then all the rest runs, so that no key is left waiting for devices that nobody uses."""
    dice = random.Random(seed)
    w = worker()
    alive: dict[int, tuple[str, ...]] = {}  # what processes see, by what was asked of the driver
    stopping: set[int] = set()
    seq = 0

    def carry_out(actions: list[ev.Action]) -> None:
        for action in actions:
            if isinstance(action, ev.StartChild):
                devices = action.devices or ()
                assert len(devices) == action.plan.devices
                alive[action.child] = devices
            elif isinstance(action, ev.StopChild):
                stopping.add(action.child)
        leased = [device for devices in alive.values() for device in devices]
        assert len(leased) == len(set(leased)), "a device was given twice"
        assert w.session.place.pool.free == 4 - len(leased), "a device leaked"

    def gone(child: int) -> None:
        del alive[child]
        stopping.discard(child)
        carry_out(w.do(ev.ChildEnded(child, "gone")))

    def step(*, quiet: bool) -> None:
        nonlocal seq
        child = dice.choice(sorted(alive)) if alive else 0
        held = w.session.place.children.get(child)
        roll = dice.random()
        if not quiet and roll < 0.25:
            spec = dice.choice([gpus(1), gpus(2), gpus(4), engine_on(1), engine_on(2), engine_on(4), ItemSpec()])
            count = dice.randint(1, 3)
            carry_out(w.assign(range(seq, seq + count), spec=spec))
            seq += count
        elif not quiet and roll < 0.32 and alive:
            gone(child)  # it crashes, or is killed
        elif not quiet and roll < 0.35 and held is not None and held.state is ChildState.STARTING:
            stopping.add(child)  # by itself
            carry_out(w.do(ev.ChildFailed(child, Failure("start", "fails", True))))
        elif roll < 0.5 and held is not None and held.state is ChildState.STARTING:
            carry_out(w.do(ev.ChildReady(child, 4 if held.plan.kind == "engine" else 1)))
        elif roll < 0.75 and held is not None and held.in_hand:
            carry_out(w.end(child, next(iter(held.in_hand))[1]))
        elif roll < 0.85 and stopping:
            gone(dice.choice(sorted(stopping)))
        else:
            carry_out(w.tick(dice.choice([0.05, 0.3, UNLOAD_S])))

    for _ in range(1000):
        step(quiet=False)
    for _ in range(20_000):
        if not w.session.held:
            break
        step(quiet=True)
    assert not w.session.held, "work waits for devices that nobody uses"
