"""A worker whose coordinator stalls, dies or comes back, and whose certificate ends."""

from __future__ import annotations

import signal
from pathlib import Path

from rollout.model.item import ItemSpec
from worker_nodes import Nodes, collect, script, started, submit, until

QUICK = {
    "heartbeat_interval_ms": 100,
    "worker_self_fence_timeout_ms": 1000,
    "coordinator_failure_timeout_ms": 1500,
    "clock_skew_budget_ms": 50,
}


async def test_a_silent_coordinator_fences_and_exclusive_attempts_die(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, **QUICK)
    try:
        coordinator = nodes.coordinator()
        await coordinator.event("coordinator_ready")
        worker = nodes.worker(worker__slots=2)
        async with await nodes.client() as runs:
            items = [
                script({"sleep_ms": 4000, "data": "kept"}),
                script({"sleep_ms": 4000, "data": "again"}, ItemSpec(exclusive=True)),
            ]
            run_id = await submit(runs, items)
            await started(runs, run_id, 2)
            children = [p for p in worker.family() if "rollout_worker.processes.runner" in " ".join(p.cmdline())]
            coordinator.process.send_signal(signal.SIGSTOP)
            await worker.event("worker_fenced")
            await until(lambda: sum(p.is_running() for p in children) == 1, "the exclusive attempt's process to end")
            coordinator.process.send_signal(signal.SIGCONT)
            await worker.event("worker_unfenced")
            entries, _ = await collect(runs, run_id)
        assert [e.data for e in entries] == [b"kept", b"again"]
        assert entries[0].attempt == 1
        assert entries[1].attempt > 1
    finally:
        nodes.close()


async def test_an_orphan_gives_up_and_begins_anew(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, orphan_grace_ms=1000, **QUICK)
    try:
        coordinator = nodes.coordinator()
        await coordinator.event("coordinator_ready")
        worker = nodes.worker()
        async with await nodes.client() as runs:
            run_id = await submit(runs, [script({"sleep_ms": 1500, "data": "x"})])
            await started(runs, run_id, 1)
            coordinator.kill()
            await worker.event("worker_orphaned")
            await until(lambda: len(worker.family()) <= 1, "its children to be gone")
            await nodes.coordinator().event("coordinator_ready")
            entries, _ = await collect(runs, run_id)
        assert [e.data for e in entries] == [b"x"]
        ready = worker.events("worker_ready")
        assert len({e["incarnation"] for e in ready}) == 2
        worker.process.send_signal(signal.SIGTERM)
        assert await worker.ended() == 0
    finally:
        nodes.close()


async def test_certificates_are_renewed_without_dropping_work(tmp_path: Path) -> None:
    """Two items run through several renewals. One whose assignment was on its way just then is given again, as
    attempt 2: it had not begun, and nothing runs twice."""
    effects = tmp_path / "effects"
    nodes = Nodes(tmp_path, certificate_lifetime_s="4")
    try:
        coordinator = nodes.coordinator()
        await coordinator.event("coordinator_ready")
        worker = nodes.worker(worker__slots=2)
        async with await nodes.client() as runs:
            items = [
                script({"sleep_ms": 7000 if i < 2 else 100, "data": str(i), "effects": str(effects)}, salt=i)
                for i in range(12)
            ]
            entries, status = await collect(runs, await submit(runs, items))
        assert [e.data for e in entries] == [str(i).encode() for i in range(12)]
        said = [tuple(line.split()[:2]) for line in effects.read_text().splitlines()]
        assert sorted(said) == sorted((what, str(i)) for what in ("start", "end") for i in range(12))
        assert status.worker_lost == 0
        assert len(worker.events("certificate_renewed")) >= 3
        assert not worker.events("worker_fenced")
    finally:
        nodes.close()


async def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    try:
        await nodes.coordinator().event("coordinator_ready")
        worker = nodes.worker()
        async with await nodes.client() as runs:
            await started(runs, await submit(runs, [script({"sleep_ms": 60_000})]), 1)
            worker.process.send_signal(signal.SIGINT)
            await worker.event("worker_draining")
            worker.process.send_signal(signal.SIGINT)
            assert await worker.ended() == 130
    finally:
        nodes.close()


async def test_configuration_errors_exit_with_2(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    try:
        assert await nodes.worker("--worker-id", "not-a-ulid").ended() == 2
        assert await nodes.worker("--plugin", "/nowhere/manifest.toml").ended() == 2
        assert await nodes.worker("--config", "/nowhere/worker.toml").ended() == 2
        assert await nodes.worker().ended() == 2  # this host has joined nothing
    finally:
        nodes.close()
