"""Channels to a plugin process: JSON frames over a socket, and gRPC."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol, cast

import grpc.aio
from rollout.model.errors import PluginError
from rollout.plugins import api
from rollout.processes.pipe import Pipe
from rollout.wire.v1 import plugin_pb2 as pb
from rollout.wire.v1 import plugin_pb2_grpc as rpc

from rollout_worker.hosting.framing import HEADER, encode, payload_of, with_payload

FATAL = frozenset({"timeout", "crashed", "flood", "bad_frame", "start"})
"""Reasons after which the process cannot be trusted and is replaced."""


@dataclass(frozen=True, slots=True)
class Limits:
    max_request_bytes: int = 16 << 20
    max_reply_bytes: int = 16 << 20
    start_timeout_s: float = 60.0
    stop_grace_s: float = 2.0
    first_backoff_s: float = 0.2
    max_backoff_s: float = 30.0


def fault(reason: str, message: str) -> PluginError:
    return PluginError(message, reason=reason)


class Channel(Protocol):
    async def call(self, method: str, payload: Any, timeout_s: float) -> Any:
        """Call a method. Raises PluginError whose context has a `reason`; see FATAL."""
        ...

    async def close(self) -> None: ...

    broken: PluginError | None
    """Reason why the channel is broken, even if no call was in progress."""


class JsonChannel:
    """Channel that matches replies by id; an unknown id, an oversized reply or a broken frame ends it."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._pipe = Pipe(self._frame, self._lost, limits.max_reply_bytes, HEADER)
        self._ids = count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self.broken: PluginError | None = None

    @classmethod
    async def over(cls, connection: socket.socket, limits: Limits) -> JsonChannel:
        channel = cls(limits)
        await channel._pipe.over(connection)
        return channel

    async def call(self, method: str, payload: Any, timeout_s: float) -> Any:
        if self.broken is not None:
            raise fault(self.broken.context["reason"], self.broken.message)
        number = next(self._ids)
        try:
            frame = encode(with_payload({"id": number, "method": method}, payload))
        except (TypeError, ValueError) as e:
            raise fault("bad_payload", f"the payload of {method} is not JSON: {e}") from e
        if len(frame) > self._limits.max_request_bytes:
            raise fault("too_large", f"the payload of {method} has {len(frame)} bytes, over the limit of "
                                     f"{self._limits.max_request_bytes}")  # fmt: skip
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._pipe.send_frame(frame)
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            raise fault("timeout", f"{method} did not answer within {timeout_s:g} s") from None
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        self._pipe.abort()
        await asyncio.sleep(0)  # it closes then

    def _frame(self, _: int, body: bytes) -> None:
        try:
            self._deliver(body)
        except PluginError as e:
            self._fail(e)
            self._pipe.abort()

    def _lost(self) -> None:
        size = self._pipe.refused
        if size:
            limit = self._limits.max_reply_bytes
            self._fail(fault("flood", f"it sent a frame of {size} bytes, over the limit of {limit}"))
        else:
            self._fail(fault("crashed", "the process ended"))

    def _deliver(self, body: bytes) -> None:
        try:
            value: Any = json.loads(body)
        except (ValueError, RecursionError) as e:
            raise fault("bad_frame", f"it sent something that is not JSON: {body[:60]!r}") from e
        if not isinstance(value, dict):
            raise fault("bad_frame", f"it sent {type(value).__name__} instead of a JSON object")
        frame = cast("dict[str, Any]", value)
        number = frame.get("id")
        answer = self._waiting.pop(number, None) if isinstance(number, int) else None
        if answer is None:
            raise fault("bad_frame", f"it sent a reply to call {number!r}, which nobody waits for")
        if answer.done():
            return
        if "error" in frame:
            answer.set_exception(_error_of(frame["error"]))
            return
        try:
            answer.set_result(payload_of(frame))
        except (ValueError, TypeError) as e:
            broken = fault("bad_frame", f"it sent a reply without a usable payload: {e}")
            answer.set_exception(broken)
            raise broken from e

    def _fail(self, error: PluginError) -> None:
        self.broken = error = self.broken or error
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(fault(error.context["reason"], error.message))


def _error_of(value: Any) -> PluginError:
    if not isinstance(value, dict):
        return fault("bad_frame", "it sent an error that is not an object")
    fields = cast("dict[str, Any]", value)
    reason = str(fields.get("code") or "plugin_error")[:60]
    # A plugin cannot have its own process replaced by naming one of our reasons.
    return fault("plugin_error" if reason in FATAL else reason, str(fields.get("message", ""))[:2000])


class GrpcChannel:
    """`Plugin` service over a Unix socket. Bytes are sent unchanged, other payloads as JSON; so are replies."""

    def __init__(self, address: str, limits: Limits) -> None:
        options = [
            ("grpc.max_receive_message_length", limits.max_reply_bytes),
            ("grpc.max_send_message_length", limits.max_request_bytes),
        ]
        self._channel = grpc.aio.insecure_channel(address, options=options)
        self._stub: Any = rpc.PluginStub(self._channel)
        self._ids = count(1)
        self.broken: PluginError | None = None  # a unary call has no reply that nobody asked for

    async def call(self, method: str, payload: Any, timeout_s: float) -> Any:
        try:
            return await self._call(method, payload, timeout_s)
        except grpc.aio.AioRpcError as e:
            reason, text = _REASONS.get(e.code(), ("plugin_error", e.details() or e.code().name))
            if e.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                text = f"its reply is over the limit: {e.details()}"
            raise fault(reason, f"{method}: {text}") from e

    async def _call(self, method: str, payload: Any, timeout_s: float) -> Any:
        if method == api.INIT:
            config = json.dumps(payload.get("config", {})).encode()
            init = _message(
                await self._stub.Init(pb.InitRequest(epoch=0, config=config), timeout=timeout_s, wait_for_ready=True)
            )
            return {"name": init.name, "version": init.version}
        if method == api.PREFLIGHT:
            ready = _message(await self._stub.Preflight(pb.PreflightRequest(epoch=0), timeout=timeout_s))
            return {"ok": ready.ok, "message": ready.message}
        if method == api.SHUTDOWN:
            await self._stub.Shutdown(pb.ShutdownRequest(epoch=0, grace_ms=1000), timeout=timeout_s)
            return {}
        raw = isinstance(payload, bytes)
        body = payload if raw else json.dumps(payload, allow_nan=False).encode()
        number = next(self._ids)
        request = pb.CallRequest(epoch=0, method=method, payload=body, timeout_ms=int(timeout_s * 1000), call_id=number)
        reply = _message(await self._stub.Call(request, timeout=timeout_s))
        if reply.call_id != number:
            raise fault("bad_frame", f"it sent a reply to call {reply.call_id} instead of {number}")
        if reply.error_code:
            raise _error_of({"code": reply.error_code, "message": reply.error_message})
        if raw:
            return reply.payload
        try:
            return json.loads(reply.payload)
        except (ValueError, RecursionError) as e:
            raise fault("bad_frame", f"it sent something that is not JSON: {reply.payload[:60]!r}") from e

    async def close(self) -> None:
        await self._channel.close()


def _message(reply: Any) -> Any:
    """Return the reply; grpc.aio returns None for bytes that are no message."""
    if reply is None:
        raise fault("bad_frame", "it sent something that is no message of the protocol")
    return reply


_REASONS: dict[grpc.StatusCode, tuple[str, str]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: ("timeout", "did not answer in time"),
    grpc.StatusCode.UNAVAILABLE: ("crashed", "the process ended"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: ("flood", ""),
    grpc.StatusCode.UNIMPLEMENTED: ("unknown_method", "the sidecar does not implement it"),
}
