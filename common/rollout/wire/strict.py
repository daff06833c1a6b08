"""Bytes that are no message of the protocol end a call with INVALID_ARGUMENT, whatever the kind of call.

Without this grpc.aio answers UNKNOWN and logs a traceback for each of them, which any peer could fill a disk with.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from rollout.model.errors import ProtocolError
from rollout.wire.errors import abort

_KINDS = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}


class _NoMessage:
    def __init__(self, error: DecodeError) -> None:
        self.error = error


class StrictInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor for all our servers, whose handlers are coroutine functions."""

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        kind = _KINDS[handler.request_streaming, handler.response_streaming]
        behaviour = getattr(handler, kind)
        if not inspect.iscoroutinefunction(behaviour):
            return handler
        changed: dict[str, Any] = {kind: _guarded(behaviour)}
        if not handler.request_streaming:
            changed["request_deserializer"] = _lenient(handler.request_deserializer)
        return handler._replace(**changed)


def _lenient(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a deserializer that passes an error on: a unary call is deserialized before our code runs."""

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return _NoMessage(error)

    return read


def _guarded(behaviour: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    async def call(request: Any, context: Any) -> Any:
        try:
            if isinstance(request, _NoMessage):
                raise request.error
            return await behaviour(request, context)
        except DecodeError as error:
            await abort(context, ProtocolError(f"Not a message of this protocol: {error}"))

    return cast("Callable[[Any, Any], Any]", call)
