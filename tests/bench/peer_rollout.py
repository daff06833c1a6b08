"""Ours for peers.py: a coordinator on SQLite (synchronous=FULL) and two workers over mTLS."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "smoke"))

from cluster import Cluster
from peer_serve import SIZE, SLOTS, WORKERS, payload, serve
from rollout.client import Runs
from rollout.client.runs import new_ulid
from rollout.model.item import NewItem
from rollout.model.run import RunSpec

ABOUT = "fsync before every answer; results once, in order; mutual TLS"


def waits(sleep_ms: int) -> bytes:
    """A run of the mock inference engine, whose rows wait; no-ops go to the scripted executor."""
    backend = {"kind": "mock", "delay_ms": sleep_ms, "concurrency": SLOTS}
    return json.dumps({"model": {"uri": "mock"}, "sampling": {}, "backend": backend}).encode()


def row(n: int) -> bytes:
    fields = {"row": {"prompt": "." * (SIZE - 90)}, "index": n, "file": "in.jsonl", "line": n}
    return json.dumps(fields, separators=(",", ":")).encode()


async def main() -> None:
    with tempfile.TemporaryDirectory() as root, Cluster(Path(root)) as cluster:
        cluster.add_coordinator().wait_event("coordinator_ready")
        for _ in range(WORKERS):
            cluster.add_worker(worker={"slots": 1}).wait_event("worker_ready")
        async with await Runs.connect(cluster.addresses, tls_dir=Path(cluster.operator()[-1])) as client:

            async def run(items: int, sleep_ms: int) -> None:
                workload, config = ("infer", waits(sleep_ms)) if sleep_ms else ("script", b"{}")
                spec = RunSpec(new_ulid(), workload, config)

                def rows(start: int) -> Iterator[NewItem]:
                    for n in range(start, items):
                        yield NewItem(n.to_bytes(32, "big"), row(n) if sleep_ms else payload(n, 0))

                await client.open(spec)
                submitting = asyncio.create_task(client.submit(spec, rows))
                async for page in client.watch(spec.run_id, status_only=True):
                    if page.last:
                        assert page.status is not None and page.status.done == items, page.status
                await submitting

            await serve(run, ABOUT)


if __name__ == "__main__":
    asyncio.run(main())
