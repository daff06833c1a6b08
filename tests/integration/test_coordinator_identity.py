"""Hosts that joined, over real mutual TLS: none of them can be a worker of another."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import grpc
import pytest
from coordinator_peers import FakeClient, FakeWorker, credentials, items, ulid
from coordinator_places import free_addr, inprocess
from rollout.model.errors import AuthError
from rollout.security.authority import Authority
from rollout.security.join_client import join
from rollout.security.roles import Role
from rollout.security.tokens import create_token
from rollout.wire.channel import open_channel
from rollout.wire.v1 import common_pb2, heartbeat_pb2, heartbeat_pb2_grpc, runs_pb2, work_pb2, work_pb2_grpc
from rollout_coordinator.wiring import Parts


async def enrol(parts: Parts, directory: Path, name: str) -> Path:
    """A host of its own, by a token of its own."""
    authority = Authority.load(directory / "tls", "rollout")
    assert authority is not None
    token = await create_token(parts.storage, Role.WORKER, ca_hash=authority.ca_hash)
    await join(parts.settings.transport.join_addr, token, directory / name, name)
    return directory / name


async def hello_ends(channel: grpc.aio.Channel, incarnation: str, **then: Any) -> tuple[grpc.StatusCode, str]:
    """Says Hello, and one thing more; how the stream ended."""
    call, session = work_pb2_grpc.WorkStub(channel).Stream(), ulid()
    body = work_pb2.Hello(incarnation=incarnation, inventory=common_pb2.Inventory(capacity={"slots": 1.0}))
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(work_pb2.WorkUp(epoch=0, session=session, hello=body))
        if then:
            await call.write(work_pb2.WorkUp(epoch=0, session=session, **then))
        while await call.read() is not grpc.aio.EOF:  # pyright: ignore[reportAttributeAccessIssue]
            pass
    async with asyncio.timeout(10):
        return await call.code(), await call.details()


async def test_a_host_cannot_buy_the_incarnation_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    addr = free_addr()
    monkeypatch.setenv("ROLLOUT_TRANSPORT__JOIN_ADDR", free_addr())
    run_id, go = ulid(), False
    async with inprocess(tmp_path, listen=addr) as (_, parts):
        ours, theirs = [await enrol(parts, tmp_path, name) for name in ("ours", "theirs")]
        worker = await FakeWorker([addr], ours, work=lambda held: b"x" if go else None).start()
        client = await FakeClient.open([addr], tmp_path / "tls")
        await client.submit(run_id, [items(20)])
        await worker.until(lambda: len(worker.held) == 20)
        with pytest.raises(AuthError, match=r"belongs to host .* start this process anew, without --worker-id"):
            await credentials(theirs, Role.WORKER, worker.incarnation)
        assert (await credentials(theirs, Role.WORKER)).not_after, "one of its own it may buy"
    async with inprocess(tmp_path, listen=addr):  # the claim is durable
        with pytest.raises(AuthError, match="belongs to host"):
            await credentials(theirs, Role.WORKER, worker.incarnation)
        renewed = await credentials(ours, Role.WORKER, worker.incarnation)
        await renewed.renew()
        assert renewed.generation == 2
        await worker.until(lambda: worker.welcomes == 2)
        go = True
        await worker.poke()
        await client.patiently(lambda: client.submit(run_id, [items(20)]))
        log, status = await client.collect(run_id)
        assert len(log) == 20 and status.state == "completed" and status.worker_lost == 0 and status.attempts == 20
        await worker.stop()
        await client.close()


async def test_the_core_refuses_a_known_incarnation_from_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of the coordinator's machine issues its own certificate and claims nothing."""
    monkeypatch.setenv("ROLLOUT_TRANSPORT__JOIN_ADDR", free_addr())
    async with inprocess(tmp_path) as (node, parts):
        theirs = await enrol(parts, tmp_path, "theirs")
        worker = await FakeWorker([node.addr], tmp_path / "tls").start()
        await worker.until(lambda: worker.welcomes == 1)
        channel = open_channel(node.addr, await credentials(theirs, Role.WORKER, worker.incarnation))
        code, details = await hello_ends(channel, worker.incarnation)
        assert code == grpc.StatusCode.INVALID_ARGUMENT and "lives on host (none), not on" in details
        await heartbeat_pb2_grpc.HeartbeatStub(channel).Beat(
            heartbeat_pb2.BeatUp(epoch=0, incarnation=worker.incarnation, state=heartbeat_pb2.WORKER_STATE_DRAINING)
        )
        client = await FakeClient.open([node.addr], tmp_path / "tls")
        await client.submit(run_id := ulid(), [items(5)])
        log, _ = await client.collect(run_id)
        assert len(log) == 5 and worker.welcomes == 1 and not worker.failures
        reply = await client.stub.Workers(runs_pb2.WorkersRequest(epoch=0, all=True))
        assert {w.incarnation: w.state for w in reply.workers} == {worker.incarnation: "ready"}
        await worker.stop()
        await client.close()
        await channel.close()


async def test_a_quarantine_outlives_the_coordinator(tmp_path: Path) -> None:
    me, addr = ulid(), free_addr()
    group = work_pb2.ResultGroup(log=1, seq=[3], attempt=[9], length=[1], data=b"!", duration_ms=[1])
    async with inprocess(tmp_path, listen=addr):
        channel = open_channel(addr, await credentials(tmp_path / "tls", Role.WORKER, me))
        code, details = await hello_ends(channel, me, results=work_pb2.Results(groups=[group]))
        assert code == grpc.StatusCode.INVALID_ARGUMENT and "quarantined" not in details
        await channel.close()
    async with inprocess(tmp_path, listen=addr):
        channel = open_channel(addr, await credentials(tmp_path / "tls", Role.WORKER, me))
        code, details = await hello_ends(channel, me)
        assert code == grpc.StatusCode.INVALID_ARGUMENT and "is quarantined" in details and "Start it anew" in details
        await channel.close()
