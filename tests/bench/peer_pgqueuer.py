"""PgQueuer for peers.py: bulk enqueue, two worker processes that dequeue in batches. `peer_pgqueuer.py URL [worker]`.

PostgreSQL runs with fsync and synchronous_commit on. A job is done when its row has left the queue table.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from datetime import timedelta

import asyncpg
import pgqueuer
from peer_serve import SLOTS, WORKERS, payload, serve, sleep_of
from pgqueuer import AsyncpgDriver, AsyncpgPoolDriver, Job, PgQueuer, Queries

ABOUT = (
    f"PgQueuer {pgqueuer.__version__}: PostgreSQL with fsync; at least once, no result kept, no order; "
    "no TLS (loopback)"
)
BATCH = 200
CHUNK = 5000


async def worker(url: str) -> None:
    async with asyncpg.create_pool(url, min_size=2, max_size=5) as pool:
        queue = PgQueuer(AsyncpgPoolDriver(pool))

        @queue.entrypoint("noop")
        async def noop(job: Job) -> None:  # pyright: ignore[reportUnusedFunction]
            pass

        @queue.entrypoint("wait", concurrency_limit=SLOTS)
        async def wait(job: Job) -> None:  # pyright: ignore[reportUnusedFunction]
            await asyncio.sleep(sleep_of(job.payload or b""))

        await queue.run(dequeue_timeout=timedelta(seconds=5), batch_size=BATCH)


async def main(url: str) -> None:
    connection = await asyncpg.connect(url)
    queries = Queries(AsyncpgDriver(connection))
    await queries.install()
    workers = [subprocess.Popen([sys.executable, __file__, url, "worker"]) for _ in range(WORKERS)]

    async def run(items: int, sleep_ms: int) -> None:
        name = "wait" if sleep_ms else "noop"
        for first in range(0, items, CHUNK):
            batch = range(first, min(items, first + CHUNK))
            await queries.enqueue([name] * len(batch), [payload(n, sleep_ms) for n in batch], [0] * len(batch))
        while await connection.fetchval("SELECT EXISTS (SELECT 1 FROM pgqueuer)"):  # noqa: ASYNC110 - a query tells
            await asyncio.sleep(0.02)

    try:
        await serve(run, ABOUT)
    finally:
        for process in workers:
            process.terminate()
        for process in workers:
            process.wait(timeout=30)
        await connection.close()


if __name__ == "__main__":
    asyncio.run(worker(sys.argv[1]) if sys.argv[2:] == ["worker"] else main(sys.argv[1]))
