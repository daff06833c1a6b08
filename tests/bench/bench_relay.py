"""What the relay adds to a request: from a gateway to a replica that answers at once, and back."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from cluster import Cluster
from measure import TESTS, Row, directory, percentile
from rollout.client import Runs
from rollout.client.relay import Replica, ReplicaStream, Said, Up
from rollout.client.runs import new_ulid
from rollout.model.item import NewItem
from rollout.model.run import RunSpec

BESIDE = 32
"""Requests in flight at once."""


def install(root: Path) -> None:
    """The executor of tests/integration/third_party, for the daemons that start from here on."""
    about = root / "site" / "echoes-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: echoes\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[rollout.executors]\necho = echoes:Echo\n")
    os.environ["PYTHONPATH"] = f"{about.parent}:{TESTS / 'integration' / 'third_party'}"


async def round_trips(stream: ReplicaStream, replica: Replica, count: int, at_once: int) -> list[float]:
    """Milliseconds each; they are answered in order."""
    took: list[float] = []
    asked: list[float] = []
    events = aiter(stream)
    while len(took) < count:
        while len(asked) < count and len(asked) - len(took) < at_once:
            asked.append(time.perf_counter())
            assert stream.send(replica, b"echo " + b"x" * 200)
        assert isinstance(await anext(events), Said)
        took.append((time.perf_counter() - asked[len(took)]) * 1000)
    return took


async def measured(root: Path, count: int) -> tuple[list[float], list[float], float]:
    """Round trips one by one, and `BESIDE` at once, and how many of these a second."""
    install(root)
    with Cluster(root) as cluster:
        cluster.add_coordinator().wait_event("coordinator_ready")
        cluster.add_worker(worker={"slots": 1, "executors": ["echo"]}).wait_event("worker_ready")
        async with await Runs.connect(cluster.addresses, tls_dir=Path(cluster.operator()[-1])) as client:
            run = RunSpec(new_ulid(), "echo", b"{}")
            await client.submit(run, lambda seq: [NewItem(bytes(32), b"")][seq:])
            async with client.replicas(run.run_id) as stream:
                up = await anext(aiter(stream))
                assert isinstance(up, Up)
                await round_trips(stream, up.replica, count // 10, 1)
                alone = await round_trips(stream, up.replica, count, 1)
                began = time.perf_counter()
                beside = await round_trips(stream, up.replica, 4 * count, BESIDE)
                return alone, beside, 4 * count / (time.perf_counter() - began)


def rows(quick: bool) -> list[Row]:
    with directory() as root:
        alone, beside, rate = asyncio.run(measured(root, 200 if quick else 2000))
    p50, p99 = percentile(alone, 0.5), percentile(alone, 0.99)
    return [
        Row(
            "200 B to a replica and back",
            f"p50 {p50:.1f}, p99 {p99:.1f} ms of {len(alone):,}",
            values={"p50_ms": p50, "p99_ms": p99},
        ),
        Row(
            f"the same, {BESIDE} in flight",
            f"{rate:,.0f}/s, p50 {percentile(beside, 0.5):.1f} ms",
            values={"per_s": rate},
        ),
    ]
