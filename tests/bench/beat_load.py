"""Many workers in one process: each its own certificate, mTLS connection, Work stream and beats every 500 ms.

Run: python tests/bench/beat_load.py ADDRESS TLS_DIR COUNT        prints ready, then counts at the end of its input
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import grpc.aio
from rollout.client.runs import new_ulid
from rollout.security.credentials import Credentials
from rollout.security.roles import Role
from rollout.wire import event_loop
from rollout.wire.channel import open_channel
from rollout.wire.v1 import common_pb2, heartbeat_pb2, heartbeat_pb2_grpc, work_pb2, work_pb2_grpc

INTERVAL_S = 0.5
EOF: Any = vars(grpc.aio)["EOF"]


class Peers(Protocol):
    """What a load process has: workers, and what it counts of them."""

    welcomed: int

    async def worker(self, number: int, count: int) -> None: ...
    def figures(self) -> dict[str, float]: ...


class Load:
    """Workers that beat and do nothing else."""

    def __init__(self, address: str, tls_dir: Path) -> None:
        self._address = address
        self._tls_dir = tls_dir
        self.welcomed = self.beats = self.acks = self.lost = 0
        self.latest = 0.0  # the most that a beat went out late

    async def worker(self, number: int, count: int) -> None:
        incarnation = new_ulid()
        owned = await Credentials.obtain(
            tls_dir=self._tls_dir, cluster="rollout", role=Role.WORKER, incarnation=incarnation, lifetime_s=3600.0,
            addresses=[],
        )  # fmt: skip
        channel = open_channel(self._address, owned)
        work_stub: Any = work_pb2_grpc.WorkStub(channel)
        beat_stub: Any = heartbeat_pb2_grpc.HeartbeatStub(channel)
        work = work_stub.Stream()
        hello = work_pb2.Hello(
            incarnation=incarnation,
            inventory=common_pb2.Inventory(capacity={"slots": 1.0}, executors=["script"], host=f"bench-{number}"),
            credit=work_pb2.Credit(items=0, bytes=1 << 20),
        )
        session = new_ulid()
        await work.write(work_pb2.WorkUp(epoch=0, session=session, hello=hello))
        welcome = await work.read()
        beats = beat_stub.Beats()
        reader = asyncio.create_task(self._acks(beats))
        watcher = asyncio.create_task(self._watch(work))
        self.welcomed += 1
        due = time.monotonic() + INTERVAL_S * number / count
        message = heartbeat_pb2.BeatUp(epoch=welcome.epoch, incarnation=incarnation, state=2)  # type: ignore[arg-type]
        try:
            while True:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                self.latest = max(self.latest, time.monotonic() - due)
                message.number += 1
                await beats.write(message)
                self.beats += 1
                due = max(due + INTERVAL_S, time.monotonic())
        finally:
            reader.cancel()
            watcher.cancel()

    async def _acks(self, call: Any) -> None:
        while await call.read() is not EOF:
            self.acks += 1
        self.lost += 1

    async def _watch(self, call: Any) -> None:
        while await call.read() is not EOF:
            pass
        self.lost += 1

    def figures(self) -> dict[str, float]:
        """Since the start; what is late, since it was asked last."""
        late, self.latest = self.latest, 0.0
        return {"beats": self.beats, "acks": self.acks, "lost": self.lost, "late_s": late}


async def main(load: Peers, count: int) -> None:
    tasks: list[asyncio.Task[None]] = []
    for number in range(count):
        tasks.append(asyncio.create_task(load.worker(number, count)))
        while number - load.welcomed > 16:  # noqa: ASYNC110 - handshakes of a few at a time are enough
            await asyncio.sleep(0.01)
    while load.welcomed < count:
        for task in tasks:
            if task.done():
                task.result()
        await asyncio.sleep(0.05)
    print(json.dumps({"ready": count}), flush=True)
    while (await asyncio.to_thread(sys.stdin.readline)).strip():
        print(json.dumps(load.figures()), flush=True)
    os._exit(0)  # a thousand open streams need no farewell


if __name__ == "__main__":
    event_loop.run(main(Load(sys.argv[1], Path(sys.argv[2])), int(sys.argv[3])))
