"""What the live page costs the coordinator while many look at a busy cluster, and what memory it takes itself."""

from __future__ import annotations

import asyncio
import re
import subprocess
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import quote

import httpx2
import psutil
from bench_engine import items
from bench_fleet import fleet
from cluster import Cluster, Node, binary
from measure import Row, cpu_s
from rollout.client import Runs
from rollout.client.runs import new_ulid
from rollout.model.run import RunSpec

WORKERS, WIDTH, RESULT = 1_000, 4, 200
TABS = 50
ITEMS = 1_000_000
SETTLING_S = 20.0
SHORT_S = (0.5, 1.5)  # that a row takes where all of them are to be done
LIMIT_S = 900.0


@contextmanager
def page(cluster: Cluster) -> Generator[tuple[str, int]]:
    """Its address, and its process."""
    command = [binary("rollout"), "ui", "--listen", "127.0.0.1:0", *cluster.operator()]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            yield next(found[0] for line in process.stderr if (found := re.search(r"http://\S+/", line))), process.pid
        finally:
            process.terminate()


async def look(url: str, path: str, heard: list[int], number: int) -> None:
    """A tab, until it is closed."""
    address = f"{url}stream?page={quote(path, safe='')}"
    async with httpx2.AsyncClient(timeout=None) as client, client.stream("GET", address) as answer:
        async for line in answer.aiter_lines():
            heard[number] += line.startswith("event: change")


@asynccontextmanager
async def watched(cluster: Cluster, run_id: str) -> AsyncGenerator[tuple[int, list[int]]]:
    """`TABS` tabs on five views: the page's process, and the events that each tab hears, once it is over."""
    views = ("/", f"/runs/{run_id}", "/workers", f"/runs/{run_id}/items?which=running", "/events")
    with page(cluster) as (url, own):
        heard = [0] * TABS
        tabs = [asyncio.create_task(look(url, views[n % len(views)], heard, n)) for n in range(TABS)]
        try:
            yield own, heard
        finally:
            for tab in tabs:
                tab.cancel()
            await asyncio.gather(*tabs, return_exceptions=True)


def mib(pid: int) -> float:
    return psutil.Process(pid).memory_info().rss / (1 << 20)


async def cost(cluster: Cluster, node: Node, seconds: float, count: int) -> dict[str, float]:
    assert node.process is not None
    pid = node.process.pid
    async with await Runs.connect(cluster.addresses, tls_dir=Path(cluster.operator()[-1])) as client:
        spec = RunSpec(new_ulid(), "script", b"{}")
        await client.open(spec)
        await client.submit(spec, lambda seq: items(count, 256, seq))
        await asyncio.sleep(SETTLING_S)
        before, began = cpu_s(pid), time.monotonic()
        await asyncio.sleep(seconds)
        alone = (cpu_s(pid) - before) / (time.monotonic() - began)
        async with watched(cluster, spec.run_id) as (own, heard):
            await asyncio.sleep(5)
            before, used, began = cpu_s(pid), cpu_s(own), time.monotonic()
            already = sum(heard)
            await asyncio.sleep(2 * seconds)
            wall = time.monotonic() - began
            with_tabs, of_page = (cpu_s(pid) - before) / wall, (cpu_s(own) - used) / wall
            updates = (sum(heard) - already) / TABS / wall
    return {"alone": alone, "with": with_tabs, "page": of_page, "updates": updates}


async def memory(cluster: Cluster, count: int) -> dict[str, float]:
    """Of the page's process while a run of `count` items goes from its first tenth to its end."""
    async with await Runs.connect(cluster.addresses, tls_dir=Path(cluster.operator()[-1])) as client:
        spec = RunSpec(new_ulid(), "script", b"{}")
        await client.open(spec)
        submitting = asyncio.create_task(client.submit(spec, lambda seq: items(count, 256, seq)))
        began, first, most, last, done = time.monotonic(), 0.0, 0.0, 0.0, 0
        async with watched(cluster, spec.run_id) as (own, _):
            async for found in client.watch(spec.run_id, status_only=True):
                done = found.status.cursor if found.status is not None else done
                last = mib(own)
                if done < count / 10:
                    first = last
                most = max(most, last)
                if found.last or time.monotonic() - began > LIMIT_S:
                    break
        submitting.cancel()
    return {"first": first, "most": most, "last": last, "done": done, "seconds": time.monotonic() - began}


def rows(quick: bool) -> list[Row]:
    count, seconds, total = (100, 10.0, 20_000) if quick else (WORKERS, 30.0, ITEMS)
    with fleet(count, WIDTH, RESULT) as (cluster, node, _):
        found = asyncio.run(cost(cluster, node, seconds, total))
    with fleet(count, WIDTH, RESULT, SHORT_S) as (cluster, _, _):
        kept = asyncio.run(memory(cluster, total))
    more = found["with"] - found["alone"]
    return [
        Row(
            f"{TABS} tabs of the live page on five views, {total:,} items, {count:,} workers",
            f"{100 * more:.1f} % of a core more for the coordinator ({found['with']:.2f} with, {found['alone']:.2f} "
            f"without); the page's process {found['page']:.2f} cores; {found['updates']:.1f} updates/s a tab",
            "≤5 % of a core",
            reached=more <= 0.05,
        ),
        Row(
            f"memory of the page's process, {TABS} tabs, {kept['done']:,.0f} items, {count:,} workers, {kept['seconds']:,.0f} s",
            f"{kept['first']:.0f} MiB after a tenth, {kept['most']:.0f} at most, {kept['last']:.0f} at the end",
            "flat (+10 %)",
            reached=kept["done"] == total and kept["most"] <= 1.1 * kept["first"],
        ),
    ]
