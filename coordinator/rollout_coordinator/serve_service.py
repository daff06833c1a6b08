"""The Serve stream of a gateway: passes its frames to replicas, and their answers back (relay.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from rollout.model.errors import ProtocolError, UnavailableError
from rollout.security.roles import Peer, Role
from rollout.wire.frames import frames_of, joined
from rollout.wire.v1 import serve_pb2, serve_pb2_grpc

from rollout_coordinator.leadership import Gate, read
from rollout_coordinator.relay import Gateway, Relay
from rollout_coordinator.run_views import RunViews

WORKER_UNREAD_MAX = 16 << 20
"""Bytes that may wait for a worker before gateways wait, too, so that requests do not slow its other work."""


class ServeService(serve_pb2_grpc.ServeServicer):
    """One coroutine reads, one writes; the first to end ends the call."""

    def __init__(self, gate: Gate, relay: Relay, views: RunViews) -> None:
        self._gate = gate
        self._relay = relay
        self._views = views

    async def Stream(self, request_iterator: Any, context: Any) -> None:
        async with self._gate.answering(context):
            gateway, peer, first = await self._open(context)
            tasks: list[asyncio.Task[None]] = []
            try:
                await context.send_initial_metadata(())  # as in WorkService
                tasks.append(asyncio.create_task(self._read(gateway, peer, first, context)))
                tasks.append(asyncio.create_task(self._write(gateway, context)))
                tasks.append(asyncio.create_task(gateway.outbox.failed.wait()))  # type: ignore[arg-type]
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if gateway.outbox.closed is not None:
                    raise gateway.outbox.closed
                for task in done:
                    task.result()
                raise UnavailableError("The gateway closed its stream.")
            finally:
                self._relay.close(gateway)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _open(self, context: Any) -> tuple[Gateway, Peer, serve_pb2.GatewayUp]:
        first: serve_pb2.GatewayUp | None = await read(context)
        if first is None:
            raise ProtocolError("The stream ended before it was opened.")
        self._gate.check(first)
        peer = self._gate.peer(context, Role.OPERATOR)
        if first.WhichOneof("body") != "open":
            raise ProtocolError(f"The first frame must be OpenGateway, not {first.WhichOneof('body')}.")
        async with self._gate.waiting():
            view = await self._views.get(first.open.run_id)
        return self._relay.open(view.spec.run_id, self._gate.epoch), peer, first

    async def _read(self, gateway: Gateway, peer: Peer, first: serve_pb2.GatewayUp, context: Any) -> None:
        frames = frames_of(first)[1:]
        while True:
            for frame in frames:
                self._gate.check(frame)
                self._gate.check_host(peer)
                if frame.WhichOneof("body") != "data":
                    raise ProtocolError(f"A gateway sends data, not {frame.WhichOneof('body')}.")
                went_to = self._relay.to_replica(gateway, frame.data)
                if went_to is not None and went_to.data_bytes > WORKER_UNREAD_MAX:
                    await went_to.room(WORKER_UNREAD_MAX)
            message = await read(context)
            if message is None:
                return
            frames = frames_of(message)

    async def _write(self, gateway: Gateway, context: Any) -> None:
        while (frame := await gateway.outbox.take()) is not None:
            for message in joined(self._frames(gateway, frame)):
                await context.write(message)

    def _frames(self, gateway: Gateway, frame: Any) -> Iterator[serve_pb2.GatewayDown]:
        """Yield `frame` and everything queued behind it."""
        while frame is not None:
            stamped = serve_pb2.GatewayDown()
            stamped.CopyFrom(frame)  # several gateways may be given the same
            stamped.epoch = self._gate.epoch
            yield stamped
            frame = gateway.outbox.take_nowait()
