"""No-op items from submit to commit: one coordinator and two workers over mTLS, SQLite, on this machine.

Run: python tests/bench/bench_engine.py [items] [repeats]
"""

from __future__ import annotations

import asyncio
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "smoke"))

from cluster import Cluster
from rollout.client import Runs
from rollout.client.runs import new_ulid
from rollout.model.item import NewItem
from rollout.model.run import RunSpec


def items(count: int, size: int, start: int) -> Iterator[NewItem]:
    payload = b"noop".ljust(size, b".")
    for n in range(start, count):
        yield NewItem(n.to_bytes(32, "big"), payload)


async def once(client: Runs, count: int, size: int) -> float:
    spec = RunSpec(new_ulid(), "script", b"{}")
    began = time.perf_counter()
    await client.open(spec)
    submitting = asyncio.create_task(client.submit(spec, lambda seq: items(count, size, seq)))
    async for page in client.watch(spec.run_id, status_only=True):
        if page.last:
            break
    await submitting
    return time.perf_counter() - began


async def main(count: int, repeats: int) -> None:
    print(f"{platform.node()}: {os.cpu_count()} cores, Python {platform.python_version()}, SQLite, 2 workers, mTLS")
    print(f"{'payload':>8} {'items':>9} {'median s':>9} {'min-max':>13} {'items/s':>9} {'coordinator CPU µs/item':>24}")
    with tempfile.TemporaryDirectory() as root, Cluster(Path(root)) as cluster:
        coordinator = cluster.add_coordinator()
        coordinator.wait_event("coordinator_ready")
        for _ in range(2):
            cluster.add_worker(worker={"slots": 4}).wait_event("worker_ready")
        assert coordinator.process is not None
        process = psutil.Process(coordinator.process.pid)
        async with await Runs.connect(cluster.addresses, tls_dir=Path(cluster.operator()[-1])) as client:
            await once(client, 2000, 256)
            for size in (256, 4096):
                times: list[float] = []
                before = process.cpu_times()
                for _ in range(repeats):
                    times.append(await once(client, count, size))
                after = process.cpu_times()
                cpu = (after.user + after.system - before.user - before.system) / (count * repeats)
                median = statistics.median(times)
                spread = f"{min(times):.2f}-{max(times):.2f}"
                print(f"{size:>6} B {count:>9} {median:>9.2f} {spread:>13} {count / median:>9.0f} {cpu * 1e6:>24.1f}")


if __name__ == "__main__":
    asyncio.run(main(*(int(a) for a in sys.argv[1:3]), *(50_000, 5)[len(sys.argv[1:3]) :]))
