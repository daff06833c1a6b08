"""Processes killed, stopped and told to leave, in the middle of work that must not happen twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from cluster import Node
from engine_cluster import Engine, done, on_both_databases, outcomes, overlap, until
from rollout.model.item import Outcome


@pytest.fixture
async def pair(rough: Engine) -> AsyncIterator[list[Node]]:
    """Two workers of two slots; made anew only where a test before has killed or stopped them."""
    cluster = rough.cluster
    alive = [node for node in cluster.workers if node.alive()]
    for _ in range(2 - len(alive)):
        alive.append(cluster.worker(str(len(cluster.workers)), 2))
    await asyncio.to_thread(cluster.ready)
    yield alive
    for node in alive:
        if node.alive():
            node.kill(signal.SIGCONT)


def holder(rough: Engine, pair: list[Node], worker: str) -> Node:
    return next(node for node in pair if rough.cluster.incarnation(node) == worker)


async def holding(rough: Engine, pair: list[Node], run: str) -> Node:
    """The worker that has work."""
    while True:
        reply = await rough.client.workers()
        for status in reply.workers:
            if status.in_flight:
                return holder(rough, pair, status.incarnation)
        await asyncio.sleep(0.05)


@on_both_databases
async def test_chains_survive_their_worker_and_the_coordinator(rough: Engine, pair: list[Node]) -> None:
    gates = [rough.gate(f"gate-{n}") for n in range(8)]
    items = [
        rough.item(
            {"chain_append": True, "data": f"{n}.", "until": str(gate), "effects": rough.effects_file}, chain="c"
        )
        for n, gate in enumerate(gates)
    ]
    run = await rough.submit(items)
    for gate in gates[:2]:
        gate.touch()
    await rough.started(3)
    victim = await holding(rough, pair, run)
    await asyncio.to_thread(victim.kill)
    for gate in gates[2:5]:
        gate.touch()
    await until(lambda: any(e.name == "5." for e in rough.effects("start")), "the chain to go on elsewhere")
    await rough.restart_coordinator()
    for gate in gates[5:]:
        gate.touch()
    entries, status = await rough.finish(run)
    assert done(entries)[-1] == "".join(f"{n}." for n in range(8))
    assert (status.state, status.worker_lost) == ("completed", 1)
    counts = Counter(e.name for e in rough.effects("start"))
    assert counts.pop("2.") == 2, "it ran on the worker that died"
    assert set(counts.values()) == {1}, "the coordinator's death cost no attempt"
    assert [e.name for e in rough.effects("end")] == [f"{n}." for n in range(8)]


@on_both_databases
async def test_a_coordinator_dies_again_at_each_step_of_its_recovery(rough: Engine, pair: list[Node]) -> None:
    gate = rough.gate()
    held = [rough.item({"data": f"held-{n}", "until": str(gate), "effects": rough.effects_file}) for n in range(4)]
    run = await rough.submit([*held, *(rough.item({"data": str(n)}) for n in range(1000))])
    await rough.started(4)
    for step in ("lease_acquired", "ledger_replayed", "coordinator_ready"):
        await rough.restart_coordinator(step)
    gate.touch()
    entries, status = await rough.finish(run)
    assert done(entries) == [*(f"held-{n}" for n in range(4)), *map(str, range(1000))]
    assert (status.state, status.worker_lost) == ("completed", 0)
    names = sorted(e.name for e in rough.effects("start"))
    assert names == [f"held-{n}" for n in range(4)], "none of the deaths cost an attempt"


@on_both_databases
async def test_children_survive_the_coordinator(rough: Engine, pair: list[Node]) -> None:
    children = [{"data": n, "until": str(rough.gate()), "effects": rough.effects_file} for n in range(6)]
    run = await rough.submit([rough.item({"spawn": children}), rough.item({"spawn": [{"data": "x"}]})])
    await rough.started(2)
    await rough.restart_coordinator()
    rough.gate().touch()
    entries, _ = await rough.finish(run)
    assert [json.loads(d) for d in done(entries)] == [[str(n) for n in range(6)], ["x"]]
    assert sorted(e.name for e in rough.effects("start")) == [str(n) for n in range(6)]


async def test_children_survive_the_worker_of_their_parent(rough: Engine, pair: list[Node]) -> None:
    children = [{"data": n, "until": str(rough.gate()), "effects": rough.effects_file} for n in range(3)]
    run = await rough.submit([rough.item({"spawn": children, "effects": rough.effects_file, "data": "parent"})])
    await rough.started(4)
    await asyncio.to_thread((await holding(rough, pair, run)).kill)
    rough.gate().touch()
    entries, _ = await rough.finish(run)
    assert json.loads(done(entries)[0]) == ["0", "1", "2"]


async def test_exclusive_work_never_overlaps_when_its_worker_is_cut_off(rough: Engine, pair: list[Node]) -> None:
    """Its daemon is stopped, and its child process is not: the guard ends that before the item begins elsewhere."""
    lock = str(rough.directory / "alone")
    body = {"until": str(rough.gate()), "effects": rough.effects_file, "data": "e", "alone": lock}
    run = await rough.submit([rough.item(body, exclusive=True)])
    await rough.started(1)
    victim = await holding(rough, pair, run)
    name = rough.cluster.incarnation(victim)
    victim.kill(signal.SIGSTOP)
    await until(
        lambda: any(e["worker"] == name for e in rough.cluster.coordinator.events("worker_failed")), "worker_failed"
    )
    await rough.started(2)
    victim.kill(signal.SIGCONT)
    await until(lambda: list(victim.events("worker_fenced")), "the worker to find itself fenced")
    rough.gate().touch()
    entries, _ = await rough.finish(run)
    assert done(entries) == ["e"] and entries[0].attempt >= 2
    assert [e.what for e in rough.effects() if e.what != "start"] == ["end"], "only one of them came to its end"


async def test_exclusive_work_never_overlaps_when_its_run_is_killed_and_continued(
    rough: Engine, pair: list[Node]
) -> None:
    body = {"busy_ms": 2500, "effects": rough.effects_file, "data": "e"}  # it hears of nothing meanwhile
    run = await rough.submit([rough.item(body, exclusive=True)])
    await rough.started(1)
    killed = (await rough.client.command(run, "kill")).state
    await rough.client.command(run, "continue")
    entries, status = await rough.finish(run)
    assert (killed, status.state, done(entries)) == ("killed", "completed", ["e"])
    told = [e.what for e in rough.effects()]
    assert overlap(rough.effects()) == 1 and told[0] == "start", told


async def test_on_worker_lost_fail(rough: Engine, pair: list[Node]) -> None:
    body = {"until": str(rough.gate()), "effects": rough.effects_file}
    run = await rough.submit([rough.item(body, fail_on_worker_lost=True)])
    await rough.started(1)
    await asyncio.to_thread((await holding(rough, pair, run)).kill)
    entries, _ = await rough.finish(run)
    assert outcomes(entries) == [Outcome.FAILED]
    assert len(rough.effects("start")) == 1


async def test_work_in_flight_outlives_a_coordinator_that_stalls(rough: Engine, pair: list[Node]) -> None:
    """For longer than any timeout: the workers fence themselves and keep what they run; it holds nobody late."""
    failed = len(list(rough.cluster.coordinator.events("worker_failed")))
    body = {"until": str(rough.gate()), "effects": rough.effects_file}
    run = await rough.submit([rough.item({**body, "data": n}) for n in range(4)])
    await rough.started(4)
    coordinator = rough.cluster.coordinator
    coordinator.kill(signal.SIGSTOP)
    for worker in pair:
        await until(lambda worker=worker: list(worker.events("worker_fenced")), "the workers to fence themselves")
    await asyncio.sleep(1)  # past coordinator_failure_timeout too, of which nobody can tell
    rough.gate().touch()
    await asyncio.sleep(0.5)
    coordinator.kill(signal.SIGCONT)
    entries, status = await rough.finish(run)
    assert done(entries) == ["0", "1", "2", "3"]
    assert Counter(e.name for e in rough.effects("start")) == {str(n): 1 for n in range(4)}, "nothing ran twice"
    assert len(list(coordinator.events("worker_failed"))) == failed
    assert status.worker_lost == 0


@on_both_databases
async def test_verbs_hold_across_a_restart(rough: Engine, pair: list[Node]) -> None:
    paused = await rough.submit([rough.item({"data": n}, require_roles=("none",)) for n in range(3)], priority=2)
    await rough.client.command(paused, "pause", reason="for the restart")
    body = {"until": str(rough.gate()), "effects": rough.effects_file}
    outlived = await rough.submit([rough.item(body)], pause_timeout_ms=1500)
    await rough.started(1)
    await rough.client.command(outlived, "pause")
    killed = await rough.submit([rough.item({"data": "k"}), rough.item({"data": "never"}, require_roles=("none",))])
    await rough.status(killed, lambda s: s.done == 1, "its first item")
    await rough.client.command(killed, "kill")
    gone = await rough.submit([rough.item({"data": "d"})])
    await rough.finish(gone)
    await rough.client.delete(gone)
    await rough.client.command(paused, "priority", priority=7)
    await rough.restart_coordinator()
    status = await rough.client.get(paused)
    assert (status.state, status.reason) == ("paused", "for the restart")
    await rough.client.command(paused, "resume")
    assert (await rough.client.get(paused)).state == "running"
    assert (await rough.client.get(killed)).state == "killed"
    assert (await rough.client.command(killed, "continue")).state == "running"
    assert (await rough.client.get(killed)).done == 1, "counted from the ledger"
    status = await rough.status(outlived, lambda s: s.state == "interrupted", "the pause to time out")
    assert [list(k.seq) for k in status.survivors] == [[0]]
    rough.gate().touch()
    entries, _ = await rough.finish(outlived)
    assert outcomes(entries) == [Outcome.DONE], "the survivor's result still counts"
    assert not [r for r in await rough.client.list() if r.spec.run_id == gone]
    for run in (paused, killed):
        await rough.client.command(run, "kill")


async def test_an_idle_worker_steals_what_a_busy_one_has_not_begun(rough: Engine, pair: list[Node]) -> None:
    busy, idle = pair
    os.kill(idle.process.pid, signal.SIGTERM)  # type: ignore[union-attr]
    await asyncio.to_thread(idle.process.wait, 20)  # type: ignore[union-attr]
    items = [rough.item({"until": str(rough.gate()), "effects": rough.effects_file, "data": n}) for n in range(4)]
    run = await rough.submit(items)
    await rough.started(2)
    stolen = len(list(rough.cluster.coordinator.events("work_stolen")))
    thief = rough.cluster.worker("thief", 2)
    await rough.started(4)
    rough.gate().touch()
    entries, _ = await rough.finish(run)
    assert done(entries) == ["0", "1", "2", "3"]
    workers = Counter(e.worker for e in entries)
    assert workers == {rough.cluster.incarnation(busy): 2, rough.cluster.incarnation(thief): 2}, rough.effects()
    assert len(list(rough.cluster.coordinator.events("work_stolen"))) > stolen
    assert len(rough.effects("start")) == 4


@pytest.mark.parametrize("how", ["SIGTERM", "preemption"])
async def test_a_worker_that_must_leave_finishes_what_runs_and_gives_back_the_rest(
    rough: Engine, pair: list[Node], how: str
) -> None:
    notice = rough.directory / "preempted"
    leaver = rough.cluster.worker("leaver", 1, compute={"preemption_file": str(notice)})
    await asyncio.to_thread(leaver.wait_event, "worker_ready")
    label = (("node", "leaver"),)
    body = {"until": str(rough.gate()), "effects": rough.effects_file}
    mine = await rough.submit([rough.item({**body, "data": n}, require_labels=label) for n in range(2)])
    await rough.started(1)
    await rough.status(mine, lambda s: s.in_flight == 2, "one to wait behind it")
    if how == "SIGTERM":
        os.kill(leaver.process.pid, signal.SIGTERM)  # type: ignore[union-attr]
    else:
        notice.write_text("spot\n")
    await asyncio.to_thread(leaver.wait_event, "worker_draining")
    await rough.status(mine, lambda s: s.in_flight == 1, "the other to be given back")
    successor = rough.cluster.worker("leaver", 1)
    rough.gate().touch()
    assert await asyncio.to_thread(leaver.process.wait, 30) == 0  # type: ignore[union-attr]
    entries, status = await rough.finish(mine)
    assert done(entries) == ["0", "1"] and len(rough.effects("start")) == 2
    assert status.worker_lost == 0
    first = rough.cluster.incarnation(leaver)
    assert [e.worker for e in entries] == [first, rough.cluster.incarnation(successor)]
    await asyncio.to_thread(successor.kill)
