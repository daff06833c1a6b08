"""An item's `memory_mib` is kept to by its process, by a control group or by a resource limit."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rollout.client import Runs
from rollout.model.item import ItemSpec
from rollout_worker import session_events as ev
from rollout_worker.attempts import Held, Plan
from rollout_worker.executors.port import Run
from rollout_worker.processes.child import ChildProcess, Guard, Handlers
from rollout_worker.processes.memory import MemoryGroups
from worker_nodes import Nodes, run_all, script

LIMIT_MIB = 300
PLAN = Plan(Run("01JD0000000000000000000000", "script", {}), "slot", "script", memory_mib=LIMIT_MIB)
CAPPED = ItemSpec(resources=(("slots", 1.0), ("memory_mib", float(LIMIT_MIB))), max_attempts=2, retry_backoff_ms=10)


@pytest.fixture
def guard(tmp_path: Path) -> Iterator[Guard]:
    guard = Guard(tmp_path / "scratch")
    yield guard
    guard.close()


@pytest.mark.parametrize(
    ("own", "delegated", "below"),
    [
        ("4:memory:/a\n0::/\n", [], "memory/a"),
        ("4:memory:/elsewhere\n", [], "memory"),  # a container, whose group is mounted at the top
        ("0::/svc/daemon\n", ["svc"], "svc"),  # systemd's DelegateSubgroup: one level up
        ("0::/svc\n", [], None),
    ],
)
def test_where_control_groups_are_made(tmp_path: Path, own: str, delegated: list[str], below: str | None) -> None:
    mount = tmp_path / "sys/fs/cgroup"
    for place in ("memory/a", "svc/daemon"):
        (mount / place).mkdir(parents=True)
    for place in delegated:
        (mount / place / "cgroup.controllers").write_text("cpu memory\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(own)
    told: list[Path] = []
    groups = MemoryGroups("rollout-x", told.append, tmp_path)
    group = groups.make(3, 1 << 20)
    if below is None:
        assert group is None and told == []
        return
    assert group is not None and group.path == mount / below / "rollout-x" / "child-3" and told == [groups.base]
    limit, report = ("memory.max", "memory.events") if delegated else ("memory.limit_in_bytes", "memory.oom_control")
    assert (group.path / limit).read_text() == str(1 << 20)
    assert not group.killed()
    (group.path / report).write_text("oom 1\noom_kill 1\n")
    assert group.killed()


class Rig:
    """A child process under a limit, and what it says."""

    def __init__(self, guard: Guard, directory: Path, memory: MemoryGroups | None, plan: Plan = PLAN) -> None:
        self.events: asyncio.Queue[ev.Event] = asyncio.Queue()

        async def nothing(*_: Any) -> dict[str, Any]:
            return {}

        handlers = Handlers(self.events.put_nowait, nothing, nothing)
        self.child = ChildProcess(
            ev.StartChild(1, plan), directory / "scratch", directory / "cache", guard, handlers, memory
        )
        self.running = asyncio.create_task(self.child.run())

    async def attempt(self, seq: int, payload: object) -> ev.Event:
        held = Held(1, seq, 1, bytes(32), json.dumps(payload).encode(), CAPPED, PLAN)
        self.child.deliver([held])
        return await asyncio.wait_for(self.events.get(), 60)


def error_of(event: ev.Event) -> str:
    assert isinstance(event, ev.ChildResults)
    return event.group.errors[0].code if event.group.errors else ""


async def test_by_a_control_group_what_is_used_counts_and_the_kernel_ends_it(guard: Guard, tmp_path: Path) -> None:
    groups = MemoryGroups(f"rollout-test-{os.getpid()}", guard.remove_groups)
    if groups.base is None:
        pytest.skip("no control group may be made here")
    rig = Rig(guard, tmp_path, groups)
    assert isinstance(await rig.events.get(), ev.ChildReady)
    assert error_of(await rig.attempt(0, {"alloc_mib": 50})) == ""
    assert await rig.attempt(1, {"alloc_mib": LIMIT_MIB}) == ev.ChildEnded(
        1, "signal SIGKILL (out of memory?)", "out_of_memory"
    )
    await rig.running
    assert list(groups.base.glob("child-*")) == []
    guard.close()
    assert not groups.base.exists(), "the guard removes them"


async def test_by_a_control_group_another_kill_is_not_out_of_memory(guard: Guard, tmp_path: Path) -> None:
    groups = MemoryGroups(f"rollout-test-{os.getpid()}", guard.remove_groups)
    if groups.base is None:
        pytest.skip("no control group may be made here")
    rig = Rig(guard, tmp_path, groups)
    assert isinstance(await rig.events.get(), ev.ChildReady)
    assert await rig.attempt(0, {"crash": True}) == ev.ChildEnded(1, "signal SIGKILL (out of memory?)", "")
    await rig.running


@pytest.mark.parametrize("by", ["control group", "resource limit"])
async def test_a_row_of_map_that_uses_too_much_costs_itself(
    by: str, guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its function has a process of its own, which the kernel may end without the executor's."""
    groups = MemoryGroups(f"rollout-test-{os.getpid()}", guard.remove_groups) if by == "control group" else None
    if groups is not None and groups.base is None:
        pytest.skip("no control group may be made here")
    (tmp_path / "hungry.py").write_text("def eat(mib):\n    return len(b'x' * (mib << 20)) >> 20\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = Run(PLAN.run.run_id, "map", {"function": "hungry:eat"})
    rig = Rig(guard, tmp_path, groups, Plan(run, "slot", "map", memory_mib=LIMIT_MIB))
    assert isinstance(await rig.events.get(), ev.ChildReady)
    assert error_of(await rig.attempt(0, 50)) == ""
    assert error_of(await rig.attempt(1, LIMIT_MIB)) == "out_of_memory"
    assert error_of(await rig.attempt(2, 50)) == ""
    rig.child.stop()
    await rig.running


async def test_by_a_resource_limit_the_allocation_fails(guard: Guard, tmp_path: Path) -> None:
    rig = Rig(guard, tmp_path, None)
    assert isinstance(await rig.events.get(), ev.ChildReady)
    assert error_of(await rig.attempt(0, {"alloc_mib": 50})) == ""
    assert error_of(await rig.attempt(1, {"alloc_mib": LIMIT_MIB})) == "out_of_memory"
    assert error_of(await rig.attempt(2, {"data": "goes on"})) == ""
    rig.child.stop()
    await rig.running


async def test_one_that_uses_too_much_fails_and_its_neighbours_run(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    try:
        await nodes.coordinator().event("coordinator_ready")
        async with await nodes.client() as runs:
            await check(nodes, runs)
    finally:
        nodes.close()


async def check(nodes: Nodes, runs: Runs) -> None:
    nodes.worker(worker__slots=2)
    items = [script({"data": "before"}, CAPPED, salt=i) for i in range(5)]
    items.append(script({"alloc_mib": LIMIT_MIB + 100}, CAPPED))
    items += [script({"data": "after", "sleep_ms": 20}, CAPPED, salt=i) for i in range(5, 15)]
    items.append(script({"alloc_mib": LIMIT_MIB + 100, "data": "no limit"}))
    entries = await run_all(runs, items)
    failure = entries[5].failure
    assert failure is not None and failure.code == "out_of_memory" and str(LIMIT_MIB) in failure.message
    assert entries[5].attempt == 2, "it counts as its own failure"
    others = [e for e in entries if e.seq != 5]
    assert all(e.failure is None and e.attempt == 1 for e in others)
    assert entries[-1].data == b"no limit"
