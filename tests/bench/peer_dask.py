"""Dask distributed over TLS for peers.py: two worker processes, tasks mapped in batches, results gathered."""

from __future__ import annotations

import asyncio
import time

import distributed
from distributed import Client, LocalCluster
from distributed.security import Security
from peer_serve import SLOTS, WORKERS, payload, serve, sleep_of

ABOUT = f"Dask {distributed.__version__}: none, tasks and results in memory; mutual TLS"


def work(data: bytes) -> int:
    if data.startswith(b"wait"):
        time.sleep(sleep_of(data))
    return len(data)


async def main() -> None:
    security = Security.temporary()
    async with (
        LocalCluster(
            n_workers=WORKERS, threads_per_worker=SLOTS, processes=True, security=security, protocol="tls://",
            dashboard_address=None, asynchronous=True,
        ) as cluster,
        Client(cluster, asynchronous=True, security=security) as client,
    ):  # fmt: skip
        batch = 1000

        async def run(items: int, sleep_ms: int) -> None:
            # `pure=False`: an equal payload is another task, not the result of the last run.
            futures = client.map(work, [payload(n, sleep_ms) for n in range(items)], pure=False, batch_size=batch)
            results = await client.gather(futures)
            assert len(results) == items

        await serve(run, ABOUT)


if __name__ == "__main__":
    asyncio.run(main())
