"""The real Objects service over gRPC in this process, with a store in a directory and faults on demand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from rollout.objects.fs import FsObjectStore
from rollout.objects.remote import RemoteObjects
from rollout.security.roles import Peer, Role
from rollout.wire.channel import CLIENT_OPTIONS, SERVER_OPTIONS
from rollout.wire.v1 import objects_pb2 as pb
from rollout.wire.v1 import objects_pb2_grpc as rpc
from rollout_coordinator.objects_service import ObjectsService


class Faults(grpc.aio.ServerInterceptor):
    """Breaks streams of Get after so many messages, as often as told."""

    def __init__(self) -> None:
        self.cut_after: list[int] = []
        self.offsets: list[int] = []
        self.damage = False

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if not details.method.endswith("/Get"):
            return handler

        async def get(request: pb.GetRequest, context: Any) -> None:
            self.offsets.append(request.offset)
            cut = self.cut_after.pop(0) if self.cut_after else -1
            await handler.unary_stream(request, _Cut(context, cut, self.damage))

        return grpc.unary_stream_rpc_method_handler(
            get, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
        )


@dataclass
class _Cut:
    context: Any
    left: int
    damage: bool

    async def write(self, message: pb.GetDown) -> None:
        if self.left == 0:
            await self.context.abort(grpc.StatusCode.UNAVAILABLE, "cut by the test")
        self.left -= 1
        if self.damage and message.chunk:
            message.chunk = bytes([message.chunk[0] ^ 1]) + message.chunk[1:]
        await self.context.write(message)

    async def abort(self, *args: Any) -> None:
        await self.context.abort(*args)


@dataclass
class Rig:
    service: ObjectsService
    store: FsObjectStore
    faults: Faults
    port: int
    opened: int = 0
    channels: list[grpc.aio.Channel] = field(default_factory=list[grpc.aio.Channel])

    async def channel(self) -> grpc.aio.Channel:
        self.opened += 1
        self.channels.append(grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options=CLIENT_OPTIONS))
        return self.channels[-1]

    def client(self, **options: Any) -> RemoteObjects:
        return RemoteObjects(self.channel, **{"pin": "run", "retry_for_s": 5.0, **options})


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    store = FsObjectStore(tmp_path / "store", reserve_bytes=0)
    await store.open()
    faults = Faults()
    service = ObjectsService(
        store, 0, max_object_bytes=4 << 20, stall_s=0.5, check_peer=lambda _: Peer(Role.WORKER, "w", "h", "test", 1e12)
    )
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[faults])
    rpc.add_ObjectsServicer_to_server(service, server)
    rig = Rig(service, store, faults, server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    yield rig
    for channel in rig.channels:
        await channel.close()
    await server.stop(0)
    await store.close()


async def raw(rig: Rig) -> Any:
    return rpc.ObjectsStub(await rig.channel())
