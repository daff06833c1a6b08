"""How old beats get at the coordinator while a worker prints 100 MB and somebody follows it with `rollout logs`.

Beside it the same rows that print to nowhere: what the machine does anyway. Nothing is asserted.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path

import map_functions
import rollout
from cluster import Cluster
from measure import Row, cpu_s, directory, percentile
from rollout.cli.printed import Reader, printed
from rollout.client import Runs

ROWS = 10
WORKERS = 2
ASK_S = 0.05


class Look:
    """Of one run: ages of the workers' beats as the coordinator has them, and the lines that came to a follower."""

    def __init__(self, addresses: list[str], tls_dir: Path, follow: bool) -> None:
        self._addresses = addresses
        self._tls_dir = tls_dir
        self._follow = follow
        self.ages: list[float] = []
        self.lines = 0
        self.seconds = 0.0

    async def at(self, run: rollout.AsyncRun) -> None:
        began = time.monotonic()
        async with await Runs.connect(self._addresses, tls_dir=self._tls_dir) as client:
            following = asyncio.create_task(self._lines(client, run.id)) if self._follow else None
            looking = asyncio.create_task(self._beats(client))
            async for outcome in run.results():
                assert outcome.ok
            self.seconds = time.monotonic() - began
            looking.cancel()
            with suppress(asyncio.CancelledError):
                await looking
            if following is not None:
                await following

    async def _beats(self, client: Runs) -> None:
        while True:
            self.ages += [worker.last_seen_s for worker in (await client.workers()).workers]
            await asyncio.sleep(ASK_S)

    async def _lines(self, client: Runs, run_id: str) -> None:
        async for _ in printed(client, run_id, Reader(), follow=True):
            self.lines += 1


async def look(addresses: list[str], tls_dir: Path, name: str, count: int) -> Look:
    found = Look(addresses, tls_dir, follow=name == "shout")
    async with rollout.connect_async(addresses, tls_dir=tls_dir) as cluster:
        run = await cluster.submit(getattr(map_functions, name), range(count))
        await found.at(run)
    return found


def rows(quick: bool) -> list[Row]:
    count = 4 if quick else ROWS
    with directory() as root, Cluster(root) as cluster:
        node = cluster.add_coordinator()
        node.wait_event("coordinator_ready")
        for _ in range(WORKERS):
            cluster.add_worker().wait_event("worker_ready")
        tls_dir = Path(cluster.operator()[-1])
        assert node.process is not None
        pid = node.process.pid
        asyncio.run(look(cluster.addresses, tls_dir, "hush", WORKERS))  # processes are up from here on
        hush = asyncio.run(look(cluster.addresses, tls_dir, "hush", count))
        before = cpu_s(pid)
        shout = asyncio.run(look(cluster.addresses, tls_dir, "shout", count))
        cpu = cpu_s(pid) - before
        failed = sum(1 for _ in node.events("worker_failed"))
    oldest = {name: max(one.ages) for name, one in (("hush", hush), ("shout", shout))}
    return [
        Row(
            f"beats each 0.5 s, {count} rows print {10 * count} MB, `logs --follow`",
            f"oldest {1000 * oldest['shout']:.0f} ms, 99 % below {1000 * percentile(shout.ages, 0.99):.0f}, "
            f"not printing {1000 * oldest['hush']:.0f}, {1000 * percentile(hush.ages, 0.99):.0f}; {failed} failed; "
            f"{shout.seconds:.1f} and {hush.seconds:.1f} s; coordinator {cpu:.2f} s; {shout.lines:,} lines",
            values={"oldest_s": oldest["shout"], "oldest_quiet_s": oldest["hush"], "coordinator_s": cpu},
        )
    ]
