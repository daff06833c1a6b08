"""No-op items from submit to commit: one coordinator and two workers over mTLS, on SQLite and on PostgreSQL.

Run: python tests/bench/report.py --only throughput
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

from cluster import Cluster
from measure import NoPostgresError, Row, cpu_s, directory, postgres, spread
from rollout.client import Runs
from rollout.client.runs import new_ulid
from rollout.model.item import NewItem
from rollout.model.run import RunSpec


def items(count: int, size: int, start: int) -> Iterator[NewItem]:
    payload = b"noop".ljust(size, b".")
    for n in range(start, count):
        yield NewItem(n.to_bytes(32, "big"), payload)


async def once(client: Runs, count: int, size: int) -> float:
    """Seconds from opening a run to its last commit."""
    spec = RunSpec(new_ulid(), "script", b"{}")
    began = time.perf_counter()
    await client.open(spec)
    submitting = asyncio.create_task(client.submit(spec, lambda seq: items(count, size, seq)))
    async for page in client.watch(spec.run_id, status_only=True):
        if page.last:
            break
    await submitting
    return time.perf_counter() - began


@asynccontextmanager
async def served(root: Path, url: str) -> AsyncGenerator[tuple[Runs, int]]:
    """A client of a coordinator with two workers, and the coordinator's process id."""
    with Cluster(root, postgres_url=url) as cluster:
        coordinator = cluster.add_coordinator()
        coordinator.wait_event("coordinator_ready")
        for _ in range(2):
            cluster.add_worker(worker={"slots": 4}).wait_event("worker_ready")
        assert coordinator.process is not None
        async with await Runs.connect(cluster.addresses, tls_dir=Path(cluster.operator()[-1])) as client:
            yield client, coordinator.process.pid


async def throughput(
    root: Path, url: str, sizes: dict[int, int], repeats: int
) -> dict[int, tuple[list[float], list[float]]]:
    """By payload size: items/s and coordinator processor time (µs an item) of each repeat. `sizes`: items a repeat."""
    found: dict[int, tuple[list[float], list[float]]] = {}
    async with served(root, url) as (client, pid):
        for size, count in sizes.items():
            await once(client, max(2000, count // 10), size)
            rates: list[float] = []
            costs: list[float] = []
            for _ in range(repeats):
                before = cpu_s(pid)
                rates.append(count / await once(client, count, size))
                costs.append((cpu_s(pid) - before) / count * 1e6)
            found[size] = rates, costs
    return found


async def together(root: Path, counts: dict[int, int], repeats: int) -> dict[int, tuple[list[float], list[float]]]:
    """As `throughput`, by the number of runs that are open at once. `counts`: items of each of them."""
    found: dict[int, tuple[list[float], list[float]]] = {}
    async with served(root, "") as (client, pid):
        await once(client, 2000, 256)
        for runs, count in counts.items():
            rates: list[float] = []
            costs: list[float] = []
            for _ in range(repeats):
                before, began = cpu_s(pid), time.perf_counter()
                await asyncio.gather(*[once(client, count, 256) for _ in range(runs)])
                rates.append(runs * count / (time.perf_counter() - began))
                costs.append((cpu_s(pid) - before) / (runs * count) * 1e6)
            found[runs] = rates, costs
    return found


def line(store: str, size: int, count: int, rates: list[float], costs: list[float], target: bool) -> Row:
    median, cost = sorted(rates)[len(rates) // 2], sorted(costs)[len(costs) // 2]
    label = f"{size} B" if size < 1024 else f"{size >> 10} KiB"
    return Row(
        f"{label}, {store}",
        f"{spread(rates, 0)} items/s, {spread(costs, 1)} µs; {len(rates)} x {count:,}",
        "≥30,000/s, ≤25 µs" if target else "",
        (median >= 30_000 and cost <= 25) if target else None,
        {"items_per_s": median, "coordinator_us_per_item": cost},
    )


def rows(quick: bool) -> list[Row]:
    sizes = {256: 10_000 if quick else 50_000, 4096: 3_000 if quick else 15_000}
    repeats = 3 if quick else 5
    found: list[Row] = []
    with directory() as root:
        for size, (rates, costs) in asyncio.run(throughput(root, "", sizes, repeats)).items():
            found.append(line("SQLite", size, sizes[size], rates, costs, size == 256))
    counts = {10: 1_000, 100: 100} if quick else {10: 5_000, 100: 500, 300: 150}
    with directory() as root:
        for runs, (rates, costs) in asyncio.run(together(root, counts, 3)).items():
            found.append(
                Row(
                    f"{runs} runs at once, SQLite",
                    f"{spread(rates, 0)} items/s, {spread(costs, 1)} µs; 3 x {runs} x {counts[runs]:,}",
                    values={"items_per_s": sorted(rates)[1], "coordinator_us_per_item": sorted(costs)[1]},
                )
            )
    try:
        with postgres() as url, directory() as root:
            for size, (rates, costs) in asyncio.run(throughput(root, url, sizes, repeats)).items():
                found.append(line("PostgreSQL", size, sizes[size], rates, costs, size == 256))
    except NoPostgresError as error:
        found.append(Row("the same on PostgreSQL", f"not run: {error}"))
    return found
