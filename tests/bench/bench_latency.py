"""Idle latency: a worker that holds nothing else asks for one more item; when is it there?"""

from __future__ import annotations

import asyncio
import secrets
import time
from pathlib import Path
from typing import Any

from cluster import Cluster
from measure import Row, directory, percentile
from rollout.client import Runs
from rollout.client.runs import new_ulid
from rollout.model.item import NewItem
from rollout.model.run import RunSpec
from rollout.security.credentials import Credentials
from rollout.security.roles import Role
from rollout.wire.channel import open_channel
from rollout.wire.frames import frames_of
from rollout.wire.v1 import common_pb2, work_pb2, work_pb2_grpc
from rollout_worker.link import EOF

IDLE_S = 0.02
"""Between two pulls: long enough for the coordinator to be idle again."""


class RawWorker:
    """Speaks the Work protocol and does nothing but count what it is given."""

    def __init__(self, call: Any, incarnation: str) -> None:
        self._call = call
        self._incarnation = incarnation
        self._session = new_ulid()
        self._epoch = 0
        self._arrived: asyncio.Queue[tuple[float, int]] = asyncio.Queue()
        self._reader: asyncio.Task[None] | None = None

    async def send(self, **body: Any) -> None:
        await self._call.write(work_pb2.WorkUp(epoch=self._epoch, session=self._session, **body))

    async def hello(self) -> None:
        inventory = common_pb2.Inventory(capacity={"slots": 100_000.0}, executors=["script"], host="bench")
        credit = work_pb2.Credit(items=0, bytes=64 << 20)
        await self.send(hello=work_pb2.Hello(incarnation=self._incarnation, inventory=inventory, credit=credit))
        welcome = await self._call.read()
        self._epoch = welcome.epoch
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while (message := await self._call.read()) is not EOF:
            for frame in frames_of(message):
                if frame.WhichOneof("body") == "assign":
                    self._arrived.put_nowait((time.perf_counter(), sum(len(g.seq) for g in frame.assign.groups)))

    async def arrival(self) -> float:
        at, count = await asyncio.wait_for(self._arrived.get(), 30)
        assert count == 1, f"{count} items in one frame"
        return at

    def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        self._call.cancel()


async def latencies(root: Path, count: int) -> tuple[list[float], list[float]]:
    """Milliseconds from pull to assignment, and from submit to assignment at a worker that waits."""
    pulls: list[float] = []
    submits: list[float] = []
    with Cluster(root) as cluster:
        cluster.add_coordinator().wait_event("coordinator_ready")
        tls_dir = cluster.add_worker(start=False).directory / "data" / "tls"
        incarnation = new_ulid()
        owned = await Credentials.obtain(
            tls_dir=tls_dir, cluster="rollout", role=Role.WORKER, incarnation=incarnation, lifetime_s=3600.0,
            addresses=cluster.addresses,
        )  # fmt: skip
        async with (
            await Runs.connect(cluster.addresses, tls_dir=Path(cluster.operator()[-1])) as client,
            open_channel(cluster.addresses[0], owned) as channel,
        ):
            stub: Any = work_pb2_grpc.WorkStub(channel)
            worker = RawWorker(stub.Stream(), incarnation)
            await worker.hello()
            spec = RunSpec(new_ulid(), "script", b"{}")
            await client.open(spec)
            await client.submit(spec, lambda seq: (NewItem(secrets.token_bytes(32), b"x" * 256) for _ in range(count)))
            for n in range(count):
                await asyncio.sleep(IDLE_S)
                began = time.perf_counter()
                await worker.send(credit=work_pb2.Credit(items=n + 1, bytes=64 << 20))
                pulls.append((await worker.arrival() - began) * 1000)
            for _ in range(count // 5):
                # With each, as a sign of life: nothing else is sent, and a silent worker is taken for dead.
                await worker.send(credit=work_pb2.Credit(items=100_000, bytes=64 << 20))
                spec = RunSpec(new_ulid(), "script", b"{}")
                await client.open(spec)
                await asyncio.sleep(IDLE_S)
                began = time.perf_counter()
                submitting = asyncio.create_task(
                    client.submit(spec, lambda _: [NewItem(secrets.token_bytes(32), b"x" * 256)])
                )
                submits.append((await worker.arrival() - began) * 1000)
                await submitting
            worker.close()
    return pulls, submits


def rows(quick: bool) -> list[Row]:
    with directory() as root:
        pulls, submits = asyncio.run(latencies(root, 200 if quick else 1000))
    found: list[Row] = []
    for what, values in (("pull", pulls), ("submit", submits)):
        p50, p99 = percentile(values, 0.5), percentile(values, 0.99)
        target = what == "pull"
        found.append(
            Row(
                f"{what} to assignment",
                f"p50 {p50:.1f}, p99 {p99:.1f}, worst {max(values):.1f} ms of {len(values):,}",
                "p50 ≤5 ms, p99 ≤20 ms" if target else "",
                (p50 <= 5 and p99 <= 20) if target else None,
                {"p50_ms": p50, "p99_ms": p99},
            )
        )
    return found
