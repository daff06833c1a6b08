"""A sidecar that speaks the Plugin service."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import grpc.aio
from rollout.wire.v1 import plugin_pb2 as pb
from rollout.wire.v1 import plugin_pb2_grpc as rpc


class Plugin(rpc.PluginServicer):
    async def Init(self, request: pb.InitRequest, context: Any) -> pb.InitResponse:
        self.config = json.loads(request.config)
        return pb.InitResponse(epoch=0, name="grpc-sidecar", version="1", abi=1)

    async def Preflight(self, request: pb.PreflightRequest, context: Any) -> pb.PreflightResponse:
        return pb.PreflightResponse(epoch=0, ok=True)

    async def Call(self, request: pb.CallRequest, context: Any) -> pb.CallResponse:
        reply = pb.CallResponse(epoch=0, call_id=request.call_id)
        if request.method == "echo":
            reply.payload = request.payload
        elif request.method == "config":
            reply.payload = json.dumps(self.config).encode()
        elif request.method == "hang":
            await asyncio.Event().wait()
        elif request.method == "huge":
            reply.payload = b"x" * (2 << 20)
        elif request.method == "crash":
            os._exit(1)
        elif request.method == "wrong_id":
            reply.call_id += 1
        elif request.method == "malformed":
            reply.payload = b"{"
        else:
            reply.error_code, reply.error_message = "unknown_method", request.method
        return reply


async def main() -> None:
    os.umask(0o177)
    server = grpc.aio.server()
    rpc.add_PluginServicer_to_server(Plugin(), server)
    server.add_insecure_port("unix:" + os.environ["ROLLOUT_PLUGIN_SOCKET"])
    await server.start()
    await server.wait_for_termination()


asyncio.run(main())
