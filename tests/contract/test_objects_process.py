"""The Objects server as a process of its own, over mTLS."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from rollout.config.settings import ObjectsSection, StorageSection, TransportSection
from rollout.objects.digest import CHUNK, object_id
from rollout.objects.remote import RemoteObjects
from rollout.security.authority import Authority
from rollout.security.credentials import Credentials
from rollout.security.roles import Role
from rollout.wire.channel import open_channel
from rollout.wire.epoch import EpochGuard
from rollout.wire.v1 import objects_pb2 as pb
from rollout.wire.v1 import objects_pb2_grpc as rpc
from ulid import ULID

BIG = os.urandom(3 * CHUNK + 12345)


@asynccontextmanager
async def server_process(tmp_path: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The process, started by way of its stdin, and its address; afterwards it has ended with its stdin."""
    tls = tmp_path / "tls"
    Authority.load_or_create(tls, "test")
    start = {
        "objects": ObjectsSection(path=str(tmp_path / "store")).model_dump(),
        "storage": StorageSection().model_dump(),
        "transport": TransportSection(tls_dir=str(tls), cluster="test", listen_addr="127.0.0.1:0").model_dump(),
        "incarnation": str(ULID()),
        "epoch": 7,
        "cloud": {},
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "rollout_coordinator.objects_server",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(start).encode() + b"\n")
        ready = json.loads(await process.stdout.readline())
        assert ready["event"] == "objects_ready", ready
        yield process, ready["addr"]
    finally:
        process.stdin.close()
        assert await asyncio.wait_for(process.wait(), 60) == 0


async def worker_channel(tmp_path: Path, address: str) -> grpc.aio.Channel:
    credentials = await Credentials.obtain(
        tls_dir=tmp_path / "tls", cluster="test", role=Role.WORKER, incarnation=str(ULID()), lifetime_s=3600
    )
    return open_channel(address, credentials)


async def test_the_server_process(tmp_path: Path) -> None:
    async with server_process(tmp_path) as (process, address):
        guard = EpochGuard()
        client = RemoteObjects(lambda: worker_channel(tmp_path, address), pin="w", guard=guard)
        assert await client.get(await client.put(BIG)) == BIG
        assert guard.current == 7
        assert process.stdin is not None
        process.stdin.write(b'{"epoch": 9}\n')
        while guard.current != 9:
            await client.has([object_id(BIG)])
        await client.close()


async def test_the_server_process_ends_with_its_stdin_though_its_store_does_not_answer(tmp_path: Path) -> None:
    """SQLite waits 30 s for a lock, in a thread that nothing can cancel; the process is given 20."""
    async with server_process(tmp_path) as (process, address):
        channel = await worker_channel(tmp_path, address)
        stub: Any = rpc.ObjectsStub(channel)
        with closing(sqlite3.connect(tmp_path / "store" / "pins.db", isolation_level=None)) as pins:
            pins.execute("BEGIN IMMEDIATE")
            pinning = stub.Has(pb.HasRequest(epoch=7, object_ids=[bytes(32)], pin="w"))
            await stub.Has(pb.HasRequest(epoch=7, object_ids=[bytes(32)]))  # by now the other has been taken up
            assert not pinning.done()
            assert process.stdin is not None
            process.stdin.close()
            await asyncio.wait_for(process.wait(), 60)
        with pytest.raises(grpc.aio.AioRpcError):
            await pinning
        await channel.close()
