"""The relay of a coordinator in this process, and workers that lie to it over real mTLS."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from coordinator_peers import FakeClient, FakeWorker, credentials, items, ulid
from coordinator_places import inprocess
from rollout.client import Runs
from rollout.client.connection import EOF
from rollout.client.relay import Event, Replica, Said, Up
from rollout.security.roles import Role
from rollout.wire.channel import open_channel
from rollout.wire.pieces import PIECE_MAX
from rollout.wire.v1 import common_pb2, serve_pb2, serve_pb2_grpc, work_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")  # grpc.aio knows one event loop a process

PATIENCE_S = 30.0


def key_of(attempt: tuple[int, int, int]) -> common_pb2.ReplicaKey:
    return common_pb2.ReplicaKey(log=attempt[0], seq=attempt[1], attempt=attempt[2])


async def announce(worker: FakeWorker, run_id: str, attempt: tuple[int, int, int]) -> None:
    await worker.send(announce=work_pb2.Announce(run_id=run_id, replica=key_of(attempt), engine=worker.incarnation))


async def test_a_worker_announces_only_what_it_was_given(tmp_path: Path) -> None:
    async with inprocess(tmp_path) as (node, _):
        honest, liar = [
            await FakeWorker([node.addr], tmp_path / "tls", credit=1, work=lambda held: None).start() for _ in range(2)
        ]
        client = await FakeClient.open([node.addr], tmp_path / "tls")
        run_id = ulid()
        await client.submit(run_id, [items(2)])
        await honest.until(lambda: bool(honest.held))
        await liar.until(lambda: bool(liar.held))
        (theirs,), (own,) = honest.held, liar.held
        async with (
            await Runs.connect([node.addr], tls_dir=tmp_path / "tls") as runs,
            runs.replicas(run_id) as stream,
        ):
            events = aiter(stream)

            async def heard() -> Event:
                return await asyncio.wait_for(anext(events), PATIENCE_S)

            await announce(honest, run_id, theirs)
            assert await heard() == Up(Replica(*theirs), honest.incarnation, honest.incarnation)
            await announce(liar, run_id, theirs)
            await announce(liar, run_id, (own[0], own[1], own[2] + 1))
            await announce(liar, run_id, (own[0], 99, 1))
            await announce(liar, ulid(), own)
            channel = (honest.epoch << 32) + 1
            for session in (liar, honest):
                said = work_pb2.RelayData(replica=key_of(theirs), channel=channel, data=session.incarnation.encode())
                await session.send(said=said)
            assert await heard() == Said(Replica(*theirs), honest.incarnation.encode())
            await announce(liar, run_id, own)
            assert await heard() == Up(Replica(*own), liar.incarnation, liar.incarnation)
        for peer in (honest, liar):
            assert not peer.failures
            await peer.stop()
        await client.close()


OPEN = "open the run that is there"
BROKEN: list[tuple[Role, list[Any], grpc.StatusCode]] = [
    (Role.WORKER, [OPEN], grpc.StatusCode.PERMISSION_DENIED),
    (Role.OPERATOR, [{"open": serve_pb2.OpenGateway(run_id="x")}], grpc.StatusCode.NOT_FOUND),
    (Role.OPERATOR, [{"data": serve_pb2.ReplicaData()}], grpc.StatusCode.INVALID_ARGUMENT),
    (Role.OPERATOR, [{}], grpc.StatusCode.INVALID_ARGUMENT),
    (Role.OPERATOR, [OPEN, OPEN], grpc.StatusCode.INVALID_ARGUMENT),
    (Role.OPERATOR, [OPEN, {"data": serve_pb2.ReplicaData(data=bytes(PIECE_MAX + 1))}], grpc.StatusCode.INVALID_ARGUMENT),
    (Role.OPERATOR, [OPEN, {"epoch": 1 << 40}], grpc.StatusCode.UNAVAILABLE),
]  # fmt: skip


async def test_gateways_that_break_the_protocol_are_refused(tmp_path: Path) -> None:
    async with inprocess(tmp_path) as (node, _):
        client = await FakeClient.open([node.addr], tmp_path / "tls")
        run_id = ulid()
        await client.submit(run_id, [items(1)])
        for role, frames, code in BROKEN:
            async with open_channel(node.addr, await credentials(tmp_path / "tls", role)) as channel:
                call: Any = serve_pb2_grpc.ServeStub(channel).Stream()
                for frame in frames:
                    body = {"open": serve_pb2.OpenGateway(run_id=run_id)} if frame == OPEN else frame
                    await call.write(serve_pb2.GatewayUp(**{"epoch": 0, **body}))
                async with asyncio.timeout(PATIENCE_S):
                    with suppress(grpc.aio.AioRpcError):
                        while await call.read() is not EOF:  # the status comes behind what was sent before
                            pass
                assert await call.code() is code, (frames, await call.details())
        await client.close()
