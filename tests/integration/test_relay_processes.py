"""Requests through the relay of a real coordinator to replicas in real processes, and what ends each of the three."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from engine_cluster import PATIENCE_S, Engine, EngineCluster
from rollout.client import Runs
from rollout.client.connection import EOF
from rollout.client.relay import Broken, Down, Draining, Event, Replica, ReplicaStream, Said, Up
from rollout.client.runs import new_ulid
from rollout.model.errors import NotFoundError
from rollout.model.run import RunSpec
from rollout.wire.v1 import common_pb2, serve_pb2, serve_pb2_grpc

THIRD_PARTY = Path(__file__).parent / "third_party"
WORKER = {"slots": 1, "executors": ["echo"], "max_engines": 4}

pytestmark = pytest.mark.parametrize("rough_cluster", ["sqlite"], indirect=True)


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What pip leaves of a package with this entry point, for the daemons that start from here on."""
    about = tmp_path / "site" / "echoes-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: echoes\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[rollout.executors]\necho = echoes:Echo\n")
    monkeypatch.setenv("PYTHONPATH", f"{about.parent}:{THIRD_PARTY}")


class Gateway:
    """A stream, and words for what goes over it."""

    def __init__(self, stream: ReplicaStream) -> None:
        self.stream = stream
        self.events = aiter(stream)

    async def next(self) -> Event:
        return await asyncio.wait_for(anext(self.events), PATIENCE_S)

    async def until(self, kind: type[Event]) -> Any:
        while not isinstance(event := await self.next(), kind):
            pass
        return event

    async def up(self) -> Replica:
        return (await self.until(Up)).replica

    async def ask(self, replica: Replica, request: bytes) -> bytes:
        """The next event, which must be an answer."""
        assert self.stream.send(replica, request)
        event = await self.next()
        assert isinstance(event, Said) and event.replica == replica, event
        return event.data

    async def told(self, replica: Replica) -> dict[str, Any]:
        """The channel of this gateway, and those that hung up."""
        return json.loads(await self.ask(replica, b"hung "))

    async def until_hung_up(self, replica: Replica) -> list[int]:
        """The channels that hung up, once there are any."""
        while True:
            if hung_up := (await self.told(replica))["hung_up"]:
                return hung_up
            await asyncio.sleep(0.02)


@asynccontextmanager
async def gateways(engine: Engine, *run_ids: str) -> AsyncIterator[list[Gateway]]:
    async with AsyncExitStack() as stack:
        yield [Gateway(await stack.enter_async_context(engine.client.replicas(run_id))) for run_id in run_ids]


async def submit(engine: Engine, replicas: int = 1) -> str:
    items = [engine.item(b"", max_worker_lost=100) for _ in range(replicas)]
    run = RunSpec(new_ulid(), "echo", b"{}")
    await engine.client.submit(run, lambda seq: iter(items[seq:]))
    return run.run_id


@pytest.fixture
async def served(rough: Engine, rough_cluster: EngineCluster) -> AsyncIterator[Engine]:
    worker = rough_cluster.add_worker(worker=WORKER)
    await asyncio.to_thread(worker.wait_event, "worker_ready")
    yield rough
    for node in rough_cluster.workers:
        if node.alive():
            node.kill()


async def test_gateways_of_a_run_get_their_own_answers(served: Engine) -> None:
    run_id = await submit(served)
    async with gateways(served, run_id, run_id) as (one, two):
        replica = await one.up()
        assert await two.up() == replica
        large = bytes(range(256)) * (3 << 12)
        assert await one.ask(replica, b"echo one") == b"one"
        assert await two.ask(replica, b"echo " + large) == large
        assert not one.stream.send(Replica(1, 99, 1), b"echo nobody")


async def test_a_gateway_that_dies_hangs_up_and_the_other_goes_on(served: Engine) -> None:
    run_id = await submit(served)
    async with gateways(served, run_id) as (stays,):
        async with gateways(served, run_id) as (dies,):
            replica = await dies.up()
            channel = (await dies.told(replica))["channel"]
        await stays.up()
        assert await stays.until_hung_up(replica) == [channel]


async def test_a_gateway_that_does_not_read_is_closed(served: Engine) -> None:
    run_id = await submit(served)
    async with gateways(served, run_id) as (reads,):
        replica = await reads.up()
        connection = served.client._connection  # pyright: ignore[reportPrivateUsage]
        channel = await connection.dial()
        call: Any = serve_pb2_grpc.ServeStub(channel).Stream()
        epoch = connection.epoch
        await call.write(serve_pb2.GatewayUp(epoch=epoch, open=serve_pb2.OpenGateway(run_id=run_id)))
        key = common_pb2.ReplicaKey(**replica._asdict())
        flood = serve_pb2.ReplicaData(replica=key, data=b"flood 64")
        await call.write(serve_pb2.GatewayUp(epoch=epoch, data=flood))
        await reads.until_hung_up(replica)  # and others are served meanwhile
        async with asyncio.timeout(PATIENCE_S):
            with suppress(grpc.aio.AioRpcError):
                while await call.read() is not EOF:
                    pass
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        await channel.close()


async def test_a_replica_that_drains_answers_until_it_ends(served: Engine) -> None:
    run_id = await submit(served)
    async with gateways(served, run_id) as (gateway,):
        replica = await gateway.up()
        gateway.stream.send(replica, b"withdraw ")
        assert await gateway.next() == Draining(replica)
        assert await gateway.ask(replica, b"echo still") == b"still"
        gateway.stream.send(replica, b"end ")
        assert await gateway.next() == Down(replica)
        assert not gateway.stream.send(replica, b"echo nobody")


async def test_a_worker_that_is_killed_takes_its_replicas_down(served: Engine) -> None:
    run_id = await submit(served)
    async with gateways(served, run_id) as (gateway,):
        replica = await gateway.up()
        for node in served.cluster.workers:
            if node.alive():
                node.kill()
        assert await gateway.next() == Down(replica)
        worker = served.cluster.add_worker(worker=WORKER)
        await asyncio.to_thread(worker.wait_event, "worker_ready")
        again = await gateway.up()
        assert (again.log, again.seq, again.attempt) == (replica.log, replica.seq, replica.attempt + 1)
        assert await gateway.ask(again, b"echo again") == b"again"


async def test_a_coordinator_that_is_killed_comes_back_with_the_same_replica(served: Engine) -> None:
    run_id = await submit(served)
    async with gateways(served, run_id) as (gateway,):
        replica = await gateway.up()
        channel = (await gateway.told(replica))["channel"]
        await served.restart_coordinator()
        await gateway.until(Broken)
        assert await gateway.up() == replica
        now = await gateway.told(replica)
        assert now["hung_up"] == [channel] and now["channel"] != channel


async def test_a_process_speaks_only_for_attempts_that_it_holds(served: Engine) -> None:
    run_id, other = await submit(served), await submit(served)
    async with gateways(served, run_id, other) as (gateway, forger):
        replica, forging = await gateway.up(), await forger.up()
        channels = [json.loads(await g.ask(r, b"hung "))["channel"] for g, r in ((gateway, replica), (forger, forging))]
        forgery = {"replica": replica._asdict(), "run": run_id, "channels": channels}
        assert await forger.ask(forging, b"forge " + json.dumps(forgery).encode()) == b"forged"
        assert await gateway.ask(replica, b"echo mine") == b"mine"

        forger.stream.send(forging, b"more ")  # its process is killed for that
        assert await forger.next() == Down(forging)
        assert await gateway.ask(replica, b"echo mine") == b"mine"


async def test_a_gateway_reaches_the_replicas_of_its_run_only(served: Engine) -> None:
    run_id, other = await submit(served), await submit(served)
    async with gateways(served, run_id, other) as (gateway, stranger):
        replica, own = await gateway.up(), await stranger.up()
        stranger.stream._up.add(replica)  # pyright: ignore[reportPrivateUsage]
        assert stranger.stream.send(replica, b"end ")
        assert await stranger.ask(own, b"echo own") == b"own"
        assert await gateway.ask(replica, b"echo mine") == b"mine"


async def test_a_gateway_tries_every_coordinator(served: Engine) -> None:
    run_id = await submit(served)
    options = await asyncio.to_thread(served.cluster.operator)
    addresses = ["127.0.0.1:1", *served.cluster.addresses]  # at the first nobody listens
    async with (
        await Runs.connect(addresses, tls_dir=Path(options[-1])) as client,
        client.replicas(run_id) as stream,
    ):
        gateway = Gateway(stream)
        assert await gateway.ask(await gateway.up(), b"echo found") == b"found"


async def test_a_gateway_of_a_run_that_is_not_there_ends(served: Engine) -> None:
    async with gateways(served, new_ulid()) as (gateway,):
        event = await gateway.next()
        assert isinstance(event, Broken) and isinstance(event.error, NotFoundError)
        with pytest.raises(StopAsyncIteration):
            await gateway.next()
