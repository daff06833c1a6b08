"""The end of a campaign: everything is stopped, then the checker judges what is left of it."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

from chaos.checker.audit import check_audit
from chaos.checker.failures import Window, unexplained
from chaos.checker.files import Expected, check_files, check_taken
from chaos.checker.ledger import Ledger, check_ledger, load
from chaos.clients import POISON, Batch
from chaos.exclusive import Exclusive
from chaos.faults.fault import Scene
from chaos.record import unix
from chaos.report import Report, Struck
from chaos.world import TTL_S, World

FAILURE_GRACE_S = TTL_S + 3.0


async def judge(scene: Scene, report: Report, exclusive: Exclusive) -> None:
    """Stops the cluster; objections go to the world, what there was into `report.totals`."""
    world = scene.world
    await asyncio.sleep(0.5)  # assignments of finished runs are retired with the next transaction
    ledger = await load(world.reader)
    # First of all: judging keeps this process busy, and the network of those that run is in it.
    await world.stop()
    found = [f"left running: {orphan}" for orphan in await world.orphans()]
    leaders = {row[2]: d.name for row in ledger.seen_leases if (d := world.coordinator_at(row[5])) is not None}
    writers = {port: {name for _, name in names} for port, names in world.ports.items()}
    batches = [batch for client in scene.clients for batch in client.batches]
    found += [*check_ledger(ledger), *check_audit(ledger, leaders, writers)]
    for batch in batches:
        check = check_taken if batch.queue_url else check_files
        found += await asyncio.to_thread(check, Expected(batch.output, batch.rows, POISON), ledger)
        if (
            world.bucket is not None
            and batch.queue_url
            and (left := await asyncio.to_thread(world.bucket.left, batch.queue_url))
        ):
            found.append(f"{batch.output}: {left} messages are still in the queue")
    found += exclusive.judge(report.faults)
    if world.bucket is not None:
        found += await world.bucket.judge()
    failures = _worker_failures(world)
    windows = [Window(f.at, f.at + max(f.held_s, f.settled_s), f.blames) for f in report.faults]
    found += unexplained(failures, windows, _killed_incarnations(world, report.faults), FAILURE_GRACE_S)
    for objection in found:
        world.object_to(objection)
    if world.objections:
        # What was judged, to judge it again: the database is gone by then.
        evidence = pickle.dumps((ledger, leaders, writers))
        await asyncio.to_thread((world.root / "judged.pickle").write_bytes, evidence)
    report.totals = _totals(scene, ledger, batches) | {"worker_failed": len(failures)} | exclusive.totals()
    if world.bucket is not None:
        report.totals["objects"] = world.bucket.objects


def _worker_failures(world: World) -> list[tuple[float, str, str]]:
    """Unix time, worker, incarnation."""
    found: list[tuple[float, str, str]] = []
    for daemon in world.coordinators:
        for entry in daemon.read_log():
            if entry["event"] == "worker_failed":
                worker = world.worker_of(entry["worker"])
                name = worker.name if worker else entry["worker"]
                found.append((unix(entry["timestamp"]), name, entry["worker"]))
    return found


def _killed_incarnations(world: World, faults: list[Struck]) -> set[str]:
    """Of each worker that was killed, the one that had started last by then."""
    found: set[str] = set()
    for fault in faults:
        for daemon in world.workers:
            if fault.kind == "worker killed" and fault.target == daemon.name:
                starts = [e for e in daemon.read_log() if e["event"] == "worker_starting"]
                before = [e["worker"] for e in starts if unix(e["timestamp"]) < fault.at]
                found.update(before[-1:])
    return found


def _totals(scene: Scene, ledger: Ledger, batches: list[Batch]) -> dict[str, Any]:
    coordinators = scene.world.coordinators
    return {
        "batches": len(batches),
        "rows": len(ledger.results),
        "attempts": sum(row[2] for row in ledger.results),
        "commands": sum(batch.starts for batch in batches),
        "not_connected": sum(client.not_connected for client in scene.clients),
        "epochs": ledger.lease[0][0] + 1,
        "transactions": ledger.lease[0][1],
        "coordinator_fenced": sum(d.count("coordinator_fenced") for d in coordinators),
        "work_stolen": sum(d.count("work_stolen") for d in coordinators),
        "looks": scene.watcher.looks,
        "longest_pause_s": round(scene.watcher.longest_pause_s, 2),
    }
