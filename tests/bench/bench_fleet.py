"""Hundreds of workers with rows in hand on one coordinator: more than it has the time for, one message a row."""

from __future__ import annotations

import asyncio
from pathlib import Path

from bench_beats import Load
from bench_engine import items
from cluster import Cluster
from measure import Row, cpu_s, directory
from rollout.client import Runs
from rollout.client.runs import new_ulid
from rollout.model.run import RunSpec

PROCESSES = 2
ROWS = 64  # in hand at each worker
SECONDS = (5.0, 15.0)  # that each of them takes


async def told(loads: list[Load]) -> dict[str, float]:
    """Sums over the processes, and the largest of what is late."""
    found = await asyncio.gather(*[asyncio.to_thread(load.ask) for load in loads])
    return {
        key: (max if key.endswith("_s") else sum)(figures[key] for figures in found) for key in found[0]
    }  # fmt: skip


async def watched(cluster: Cluster, loads: list[Load], pid: int, count: int, seconds: float) -> dict[str, float]:
    """What happened in `seconds`, after twice the time a row takes at most."""
    mean = sum(SECONDS) / 2
    settling = 2 * SECONDS[1]
    async with await Runs.connect(cluster.addresses, tls_dir=Path(cluster.operator()[-1])) as client:
        spec = RunSpec(new_ulid(), "script", b"{}")
        total = int(count * ROWS * ((settling + seconds) / mean + 1))
        await client.open(spec)
        submitting = asyncio.create_task(client.submit(spec, lambda seq: items(total, 256, seq)))
        await asyncio.sleep(settling)
        before, cpu, began = await told(loads), cpu_s(pid), asyncio.get_running_loop().time()
        await asyncio.sleep(seconds)
        after, used, wall = await told(loads), cpu_s(pid) - cpu, asyncio.get_running_loop().time() - began
        submitting.cancel()
    rates = {key: (after[key] - before[key]) / wall for key in ("beats", "acks", "accepted", "messages")}
    return {**after, **rates, "cores": used / wall}


def rows(quick: bool) -> list[Row]:
    count, seconds = (200, 10.0) if quick else (600, 30.0)
    with directory() as root, Cluster(root) as cluster:
        node = cluster.add_coordinator()
        node.wait_event("coordinator_ready")
        assert node.process is not None
        to = (cluster.addresses[0], node.directory / "data/tls", count // PROCESSES, ROWS, *SECONDS)
        loads = [Load("fleet_load.py", *to) for _ in range(PROCESSES)]
        try:
            for load in loads:
                load.answer()
            was = asyncio.run(watched(cluster, loads, node.process.pid, count, seconds))
        finally:
            for load in loads:
                load.close()
        failed = sum(1 for _ in node.events("worker_failed"))
    asked = count * ROWS / (sum(SECONDS) / 2)
    return [
        Row(
            f"{count:,} workers, {ROWS} rows in hand at each, {SECONDS[0]:g} to {SECONDS[1]:g} s a row, for {seconds:g} s",
            f"{failed} failed, {was['lost']:.0f} streams lost; {was['accepted']:,.0f} rows/s of the {asked:,.0f} that "
            f"they could, {was['cores'] / was['accepted'] * 1e6:.0f} µs a row, {was['cores']:.2f} cores; "
            f"{was['held'] / count / ROWS * 100:.0f} % in hand; {was['messages'] / was['accepted']:.2f} messages a row; "
            f"answers after {was['answer_s']:.2f} s (99 % within {was['late_answer_s']:.2f}); "
            f"{was['acks'] / count:.2f} acknowledgements a worker and second",
            "no false failure",
            failed == 0 and was["lost"] == 0,
            {"rows_per_s": was["accepted"], "false_failures": failed},
        )
    ]
