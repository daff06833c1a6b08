"""What the live page costs the coordinator while many look at a busy cluster, and what memory it takes itself."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
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


async def look(url: str, path: str, seconds: float) -> int:
    """The events that a tab hears."""
    heard = 0
    with contextlib.suppress(TimeoutError):
        address = f"{url}stream?page={quote(path, safe='')}"
        async with (
            asyncio.timeout(seconds),
            httpx2.AsyncClient(timeout=None) as client,
            client.stream("GET", address) as answer,
        ):
            async for line in answer.aiter_lines():
                heard += line.startswith("event: change")
    return heard


async def measured(cluster: Cluster, node: Node, seconds: float, count: int) -> dict[str, float]:
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
        with page(cluster) as (url, own):
            views = ("/", f"/runs/{spec.run_id}", "/workers", f"/runs/{spec.run_id}/items?which=running", "/events")
            tabs = [asyncio.create_task(look(url, views[n % len(views)], 2 * seconds + 5)) for n in range(TABS)]
            await asyncio.sleep(5)
            first = psutil.Process(own).memory_info().rss
            before, used, began = cpu_s(pid), cpu_s(own), time.monotonic()
            await asyncio.sleep(2 * seconds)
            wall = time.monotonic() - began
            with_tabs, of_page = (cpu_s(pid) - before) / wall, (cpu_s(own) - used) / wall
            last = psutil.Process(own).memory_info().rss
            heard = sum(await asyncio.gather(*tabs))
    return {
        "alone": alone, "with": with_tabs, "page": of_page, "first": first / (1 << 20), "last": last / (1 << 20),
        "heard": heard / TABS / (2 * seconds),
    }  # fmt: skip


def rows(quick: bool) -> list[Row]:
    count, seconds, total = (100, 10.0, 20_000) if quick else (WORKERS, 30.0, ITEMS)
    with fleet(count, WIDTH, RESULT) as (cluster, node, _):
        found = asyncio.run(measured(cluster, node, seconds, total))
    more = found["with"] - found["alone"]
    return [
        Row(
            f"{TABS} tabs of the live page, on five views, at a run of {total:,} items on {count:,} workers",
            f"{100 * more:.1f} % of a core more for the coordinator ({found['with']:.2f} and {found['alone']:.2f}); the "
            f"page's process {found['page']:.2f} cores, {found['first']:.0f} MiB at first, {found['last']:.0f} MiB "
            f"{2 * seconds:.0f} s later; {found['heard']:.1f} updates a second and tab",
            "≤ 5 % of a core",
            reached=more <= 0.05,
        )
    ]
