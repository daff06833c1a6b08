"""Items of 16 KiB through the engine, beside the bare store behind a bare mTLS stream, in turns."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from bare_peer import Peer
from cluster import Cluster
from measure import Row, cpu_s, directory, spread
from rollout.client import Runs
from rollout.client.runs import new_ulid
from rollout.model.item import NewItem
from rollout.model.run import RunSpec

SIZE = 16 << 10


def items(count: int, salt: int, start: int) -> Iterator[NewItem]:
    """Each payload different from every other, so that nothing is found to be stored already."""
    for n in range(start, count):
        payload = b"noop" + salt.to_bytes(8, "big") + n.to_bytes(8, "big")
        yield NewItem(n.to_bytes(32, "big"), payload.ljust(SIZE, b"."))


async def ours(client: Runs, count: int, salt: int) -> float:
    spec = RunSpec(new_ulid(), "script", b"{}")
    began = time.monotonic()
    await client.open(spec)
    submitting = asyncio.create_task(client.submit(spec, lambda seq: items(count, salt, seq)))
    async for page in client.watch(spec.run_id, status_only=True):
        if page.last:
            break
    await submitting
    return time.monotonic() - began


Figures = tuple[list[float], list[float], float]
"""MB/s of ours, of the bare peer, and coordinator processor time (µs an item)."""


async def compare(root: Path, plan: dict[int, int]) -> dict[int, Figures]:
    """By how many items a run has; `plan` says how often each is repeated."""
    found: dict[int, Figures] = {}
    peer = Peer(root / "bare")
    try:
        with Cluster(root / "cluster") as cluster:
            coordinator = cluster.add_coordinator()
            coordinator.wait_event("coordinator_ready")
            # Both workers are on this host, and a host has one cache.
            cache = {"cache_dir": str(root / "cache")}
            for _ in range(2):
                cluster.add_worker(worker={"slots": 4}, objects=cache).wait_event("worker_ready")
            assert coordinator.process is not None
            pid = coordinator.process.pid
            async with await Runs.connect(cluster.addresses, tls_dir=Path(cluster.operator()[-1])) as client:
                await ours(client, 200, 1 << 32)
                await peer.run(200 * SIZE, b"w" * SIZE)
                salt = 0
                for count, repeats in plan.items():
                    engine: list[float] = []
                    bare: list[float] = []
                    megabytes = count * SIZE / 1e6
                    before = cpu_s(pid, children=True)
                    for _ in range(repeats):
                        salt += 1
                        engine.append(megabytes / await ours(client, count, salt))
                        bare.append(megabytes / await peer.run(count * SIZE, bytes([salt]) * SIZE))
                    cost = (cpu_s(pid, children=True) - before) / (count * repeats) * 1e6
                    found[count] = engine, bare, cost
    finally:
        peer.close()
    return found


def line(count: int, figures: Figures) -> Row:
    engine, bare, cost = figures
    ratios = [a / b for a, b in zip(engine, bare, strict=True)]
    ratio = statistics.median(ratios)
    return Row(
        f"{count:,} items of 16 KiB beside a bare store",
        f"{spread(engine, 0)} MB/s, bare {spread(bare, 0)}: ratio {spread(ratios)}, {len(ratios)} pairs; "
        f"{cost:.0f} µs an item",
        "≥0.45",
        ratio >= 0.45,
        {"mb_per_s": statistics.median(engine), "bare_mb_per_s": statistics.median(bare), "ratio": ratio},
    )


def rows(quick: bool) -> list[Row]:
    """Runs of two lengths: of a second and a half, filling and draining the pipe are a good part."""
    plan = {1500: 3} if quick else {6000: 5, 24_000: 3}
    with directory() as root:
        return [line(count, figures) for count, figures in asyncio.run(compare(root, plan)).items()]
