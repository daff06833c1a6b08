"""Strangers and rude peers at the ports of a real coordinator and worker: the run beside them does not notice."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import psutil
import pytest
import pytest_asyncio
from coordinator_peers import FakeClient, ulid
from rollout.client import Runs
from rollout.wire.codec import item_batch_to_wire
from rollout.wire.v1 import runs_pb2
from worker_nodes import Nodes, collect, free_port, script, submit

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLOW = 200


@dataclass
class Scene:
    nodes: Nodes
    runs: Runs
    ports: list[int]  # mTLS, join, http, objects
    http_of_worker: int

    async def works(self, count: int = 50) -> None:
        """A run of the size passes through, and nobody was lost meanwhile."""
        async with asyncio.timeout(30):
            run_id = await submit(self.runs, [script({"echo": n}) for n in range(count)])
            entries, status = await collect(self.runs, run_id)
        assert len(entries) == count and status.done == count and status.worker_lost == 0
        coordinator, worker = self.nodes.daemons
        assert coordinator.process.poll() is None and worker.process.poll() is None
        assert not coordinator.events("worker_failed") and len(coordinator.events("worker_registered")) == 1
        for daemon in self.nodes.daemons:
            assert "Traceback" not in daemon.log.read_text(errors="replace")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    join, http, own = free_port(), free_port(), free_port()
    nodes = Nodes(tmp_path_factory.mktemp("hostile"), join_addr=f"127.0.0.1:{join}")
    try:
        nodes.env["ROLLOUT_HTTP__LISTEN_ADDR"] = f"127.0.0.1:{http}"
        ready = await nodes.coordinator().event("coordinator_ready")
        nodes.env["ROLLOUT_HTTP__LISTEN_ADDR"] = f"127.0.0.1:{own}"
        await nodes.worker(worker__slots=4).event("worker_ready")
        ports = [int(addr.rpartition(":")[2]) for addr in (nodes.address, ready["objects_addr"])]
        async with await nodes.client() as runs:
            yield Scene(nodes, runs, [*ports, join, http], own)
    finally:
        nodes.close()


async def test_random_bytes_at_every_port(scene: Scene) -> None:
    rng = random.Random(7)
    preludes = [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n" * 50]

    async def throw(port: int, prelude: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(prelude + rng.randbytes(rng.randrange(1, 40_000)))
            await writer.drain()
            async with asyncio.timeout(1):
                await reader.read()
        except (OSError, TimeoutError):
            pass  # refused, cut off or ignored: all are fine
        finally:
            writer.close()

    async with asyncio.TaskGroup() as group:
        for port in [*scene.ports, scene.http_of_worker]:
            for prelude in preludes * 5:
                group.create_task(throw(port, prelude))
        group.create_task(scene.works())
    await scene.works()


async def test_hundreds_of_connections_that_never_finish_their_handshake(scene: Scene) -> None:
    """Half of them say nothing, half stop in the middle of a ClientHello. New clients get in meanwhile."""
    hello = ssl.MemoryBIO()
    shake = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        shake.do_handshake()
    half = hello.read()[:60]
    idle: list[socket.socket] = []
    try:
        for number in range(SLOW):
            one = socket.create_connection(("127.0.0.1", scene.ports[number % len(scene.ports)]))
            if number % 2:
                one.sendall(half)
            idle.append(one)
        await scene.works()
        async with asyncio.timeout(15):
            async with await scene.nodes.client() as newcomer:
                assert (await newcomer.workers()).workers
            health = await asyncio.open_connection("127.0.0.1", scene.ports[-1])
            health[1].write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200" in await health[0].readline()
            health[1].close()
    finally:
        for one in idle:
            one.close()


async def test_a_client_that_submits_and_never_reads(scene: Scene) -> None:
    """Flow control holds it back; the coordinator's memory does not grow with what it does not read."""
    client = await FakeClient.open([scene.nodes.address], scene.nodes.tls_dir)
    coordinator = psutil.Process(scene.nodes.daemons[0].process.pid)
    before = coordinator.memory_info().rss
    call = client.stub.Submit()
    await call.write(client.open_frame(ulid(), workload="script"))
    sent = 0
    try:
        async with asyncio.timeout(2):
            for sent in range(1000):
                batch = [script(b"noop" + bytes(1000), salt=sent * 100 + n) for n in range(100)]
                await call.write(runs_pb2.SubmitUp(epoch=client.epoch, items=item_batch_to_wire(sent * 100, batch)))
    except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
    assert sent > 0
    await scene.works()
    assert coordinator.memory_info().rss - before < 200 << 20
    call.cancel()
    await client.close()


async def test_a_watcher_that_never_reads(scene: Scene) -> None:
    rows = [script({"echo": "x" * 3000, "n": n}) for n in range(3000)]
    run_id = await submit(scene.runs, rows)
    client = await FakeClient.open([scene.nodes.address], scene.nodes.tls_dir)
    coordinator = psutil.Process(scene.nodes.daemons[0].process.pid)
    calls = [
        client.stub.Watch(runs_pb2.WatchRequest(epoch=0, run_id=run_id, cursor=0, payloads=True)) for _ in range(20)
    ]
    before = coordinator.memory_info().rss
    for call in calls:
        await call.initial_metadata()
    async with asyncio.timeout(60):
        entries, status = await collect(scene.runs, run_id)
    assert len(entries) == 3000 and status.done == 3000
    await scene.works()
    assert coordinator.memory_info().rss - before < 300 << 20
    for call in calls:
        call.cancel()
    await client.close()
