"""Errors, epochs, addresses and limits, over a real server where the wire matters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from postgres_link import Link
from rollout.model import errors
from rollout.model.address import parse_address
from rollout.security.authority import Authority
from rollout.security.credentials import Credentials
from rollout.security.roles import Role
from rollout.wire import channel
from rollout.wire.channel import SERVER_OPTIONS, open_channel
from rollout.wire.epoch import EpochGuard, StaleEpochError
from rollout.wire.errors import abort, error_of, status_of
from rollout.wire.v1 import objects_pb2 as pb
from rollout.wire.v1 import objects_pb2_grpc as rpc

COORDINATOR, WORKER = "01ARZ3NDEKTSV4RRFFQ69G5FAV", "01BX5ZZKBKACTAV9WEVGEMMVRZ"


class Echo(rpc.ObjectsServicer):
    def __init__(self, error: errors.RolloutError | None = None) -> None:
        self.error = error

    async def Has(self, request: pb.HasRequest, context: Any) -> pb.HasReply:
        if self.error is not None:
            await abort(context, self.error)
        return pb.HasReply(epoch=1, has=[True])

    async def Put(self, request_iterator: AsyncIterator[pb.PutUp], context: Any) -> pb.PutReply:
        size = 0
        async for message in request_iterator:
            size += len(message.chunk)
        return pb.PutReply(epoch=1, size=size)


@asynccontextmanager
async def serving(tls_dir: Path, servicer: Any) -> AsyncIterator[tuple[Any, str, Credentials]]:
    Authority.load_or_create(tls_dir, "test")
    common: dict[str, Any] = {"tls_dir": tls_dir, "cluster": "test", "lifetime_s": 60}
    server_side = await Credentials.obtain(role=Role.COORDINATOR, incarnation=COORDINATOR, **common)
    client_side = await Credentials.obtain(role=Role.WORKER, incarnation=WORKER, **common)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    rpc.add_ObjectsServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', server_side.server_credentials())}"
    await server.start()
    try:
        async with open_channel(address, client_side) as channel:
            yield rpc.ObjectsStub(channel), address, client_side
    finally:
        await server.stop(None)


@pytest.mark.parametrize(
    "error",
    [
        errors.InputError("bad row 7"),
        errors.AuthError("not you"),
        errors.NotLeaderError("ask there", leader="10.0.0.1:50051"),
        errors.StorageFullError("disk is full"),
        errors.ObjectCorruptError("bytes differ"),
        errors.StateError("über \ud800" + "x" * 9000),
    ],
)
async def test_an_error_survives_the_wire(tmp_path: Path, error: errors.RolloutError) -> None:
    async with serving(tmp_path, Echo(error)) as (stub, _, _):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Has(pb.HasRequest(epoch=1))
    found = error_of(failed.value)
    assert type(found) is type(error)
    assert found.message[:12].replace("?", "\ud800") == error.message[:12]
    assert found.context.get("leader") == error.context.get("leader")


async def test_a_message_above_the_limit_hurts_its_sender_only(tmp_path: Path) -> None:
    async with serving(tmp_path, Echo()) as (stub, _, _):
        go_on = asyncio.Event()

        async def slow() -> AsyncIterator[pb.PutUp]:
            yield pb.PutUp(epoch=1, chunk=b"a")
            await go_on.wait()
            yield pb.PutUp(epoch=1, chunk=b"b")

        standing = asyncio.ensure_future(stub.Put(slow()))
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Put(iter([pb.PutUp(epoch=1, chunk=bytes(3 << 20))]))
        assert isinstance(error_of(failed.value), errors.ProtocolError)
        assert "too large" in error_of(failed.value).message
        go_on.set()
        assert (await standing).size == 2
        assert (await stub.Put(iter([pb.PutUp(epoch=1, chunk=bytes(1 << 20))]))).size == 1 << 20


async def test_garbage_on_the_port_hurts_nobody(tmp_path: Path) -> None:
    async with serving(tmp_path, Echo()) as (stub, address, _):
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(5000), b"\x16\x03\x01\xff\xff" + b"\xff" * 70_000):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(address.split(":")[1]))
            writer.write(garbage)
            with suppress(OSError):  # the server may have hung up already
                writer.write_eof()
            await asyncio.gather(reader.read(), return_exceptions=True)
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)
        assert (await stub.Has(pb.HasRequest(epoch=1))).has == [True]


async def test_a_server_that_hangs_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is stopped, a host that is gone: connections stay, and nobody answers. Here ten times as fast."""
    times = {"grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"}
    quick = [(key, int(value) // 10 if key in times else value) for key, value in channel.CLIENT_OPTIONS]
    monkeypatch.setattr(channel, "CLIENT_OPTIONS", quick)
    async with serving(tmp_path, Echo()) as (_, address, client_side):
        link = Link("127.0.0.1", int(address.split(":")[1]))
        link.server = await asyncio.start_server(link.accept, "127.0.0.1", 0)
        through = f"127.0.0.1:{link.server.sockets[0].getsockname()[1]}"
        try:
            async with open_channel(through, client_side) as quick_channel:
                stub = rpc.ObjectsStub(quick_channel)
                await stub.Has(pb.HasRequest(epoch=1))
                link.cut()
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await asyncio.wait_for(stub.Has(pb.HasRequest(epoch=1)), 20)
        finally:
            link.heal()
            await link.close()
    assert isinstance(error_of(failed.value), errors.UnavailableError)


def test_every_error_has_a_status() -> None:
    def kinds(kind: type[errors.RolloutError]) -> set[type[errors.RolloutError]]:
        return {kind}.union(*(kinds(k) for k in kind.__subclasses__()))

    for kind in kinds(errors.RolloutError):
        if kind.__module__.startswith("rollout.workloads."):  # of the Python API: it goes over no wire
            continue
        _, details, metadata = status_of(kind())
        assert details
        assert dict(metadata)["rollout-code"] == kind.code
    assert status_of(errors.StorageUnavailableError())[0] is grpc.StatusCode.UNAVAILABLE
    assert status_of(errors.SchemaVersionError())[0] is grpc.StatusCode.INTERNAL


def test_a_worker_adopts_newer_epochs_and_ignores_older_ones() -> None:
    guard = EpochGuard()
    guard.check_peer(pb.HasReply(epoch=5))
    assert guard.stamp(pb.HasRequest()).epoch == guard.current == 5
    with pytest.raises(StaleEpochError):
        guard.check_peer(pb.HasReply(epoch=4))
    with pytest.raises(errors.ProtocolError, match="epoch"):
        guard.check_peer(pb.HasReply())


@pytest.mark.parametrize(
    ("text", "host", "port"), [("a.b:1", "a.b", 1), ("[::1]:80", "::1", 80), ("0.0.0.0:0", "0.0.0.0", 0), (":9", "", 9)]
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)
    assert str(parse_address(text)) == text


@pytest.mark.parametrize("text", ["", "host", "::1:80", "a:70000", "http://a:1", "a:b", "[::1]", "a b:1", "a:"])
def test_what_is_no_address_is_named(text: str) -> None:
    with pytest.raises(errors.ConfigError, match=r"transport\.listen_addr"):
        parse_address(text, "transport.listen_addr")
