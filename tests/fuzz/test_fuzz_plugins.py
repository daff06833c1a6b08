"""Plugin processes that answer with whatever they like: PluginError with a reason, no hang, no other exception."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import grpc.aio
import pytest
from fuzz_budget import budget
from hostile_messages import Feed, build, damage
from hypothesis import example, given
from hypothesis import strategies as st
from rollout.model.errors import PluginError
from rollout.plugins import api
from rollout.wire.v1 import plugin_pb2
from rollout_worker.hosting.channel import GrpcChannel, JsonChannel, Limits
from rollout_worker.hosting.framing import HEADER, receive

LIMITS = Limits(max_request_bytes=1 << 16, max_reply_bytes=1 << 16)
CALL_S = 5.0

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from(["id", "payload", "error", "b64", "code", "x"]), v, max_size=4),
    max_leaves=6,
)  # fmt: skip
replies = st.fixed_dictionaries(
    {}, optional={"id": st.sampled_from([1, 2, True, 1.0, "1", None, -1, 1 << 70]), "payload": json_values, "error": json_values, "b64": json_values}
)  # fmt: skip
bodies = st.one_of(
    replies.map(lambda r: json.dumps(r).encode()),
    json_values.map(lambda r: json.dumps(r).encode()),
    st.binary(max_size=30),
    st.sampled_from(
        [b"[" * 30_000, b'{"a":' * 10_000, b'{"id": ' + b"9" * 5000 + b"}", b'{"id": 1, "payload": 1e999}', b"\xff"]
    ),
)
lies = st.sampled_from([0, 0, 0, 0, 1, -1, 1 << 20, (1 << 32) - 1])
said = st.lists(st.tuples(bodies, lies), max_size=4)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def framed(body: bytes, lie: int) -> bytes:
    size = len(body) if lie == 0 else max(0, len(body) + lie) if abs(lie) == 1 else lie
    return HEADER.pack(size) + body


@budget(50)
@given(said, st.integers(0, 2))
@example([(b'{"id": 1, "payload": {}}', 0), (b'{"id": 1, "payload": {}}', 0)], 0)
@example([(b"[" * 30_000, 0)], 0)
@example([(b'{"id": 1, "error": {"code": ""}}', 0)], 0)
def test_frames_of_a_sidecar(loop: asyncio.Runner, frames: list[tuple[bytes, int]], early: int) -> None:
    """Before, between and after the calls; then the process ends. A call that came through gave a value."""

    async def run() -> None:
        ours, theirs = socket.socketpair()
        stream = [framed(body, lie) for body, lie in frames]
        ours.setblocking(False)
        channel = await JsonChannel.over(ours, LIMITS)
        try:
            for data in stream[:early]:
                theirs.sendall(data)
            calls = [asyncio.create_task(channel.call(api.PREFLIGHT, {}, CALL_S)) for _ in range(2)]
            await asyncio.sleep(0)
            for data in stream[early:]:
                theirs.sendall(data)
            theirs.close()
            async with asyncio.timeout(2 * CALL_S):
                results = await asyncio.gather(*calls, return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    assert isinstance(result, PluginError) and result.context.get("reason"), result
                    assert result.context["reason"] != "timeout", "the end of the process was not noticed"
        finally:
            theirs.close()
            await channel.close()

    loop.run(run())


class Liar:
    """A gRPC sidecar that answers every method with the bytes it was told."""

    def __init__(self) -> None:
        self.reply = b""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def answer(request: bytes, context: Any) -> bytes:
            return self.reply

        return grpc.unary_unary_rpc_method_handler(answer)


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, liar: Liar) -> None:
        self.liar = liar

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return self.liar.service(handler_call_details)


@pytest.fixture(scope="module")
def sidecar(loop: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Liar, GrpcChannel]]:
    liar = Liar()

    async def start() -> tuple[Any, GrpcChannel]:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((_Handler(liar),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, GrpcChannel(f"127.0.0.1:{port}", LIMITS)

    server, channel = loop.run(start())
    yield liar, channel
    loop.run(channel.close())
    loop.run(server.stop(0))


KNOWN = {
    "epoch": (0,),
    "call_id": (1, 2),
    "error_code": (),
    "CallResponse.payload": (b"{}", b"[" * 5000, b"NaN", b"\xff", b"1e999"),
}
METHODS = (api.INIT, api.PREFLIGHT, api.SHUTDOWN, "score")
REPLIES = (plugin_pb2.InitResponse, plugin_pb2.PreflightResponse, plugin_pb2.ShutdownResponse, plugin_pb2.CallResponse)


@budget(50)
@given(st.integers(0, 3), st.binary(min_size=80, max_size=80), st.booleans())
def test_replies_of_a_grpc_sidecar(
    loop: asyncio.Runner, sidecar: tuple[Liar, GrpcChannel], at: int, data: bytes, raw: bool
) -> None:
    liar, channel = sidecar
    feed = Feed(data)
    liar.reply = damage(
        feed, build(REPLIES[at], feed, KNOWN | {"call_id": (channel_next(channel), 0)}).SerializeToString()
    )

    async def run() -> None:
        try:
            await channel.call(METHODS[at], b"x" if raw and at == 3 else {}, CALL_S)
        except PluginError as error:
            assert error.context.get("reason")

    loop.run(run())


def channel_next(channel: GrpcChannel) -> int:
    """The number that its next call will have."""
    return int(repr(channel._ids).partition("(")[2].rstrip(")"))


def test_a_grpc_reply_of_nested_brackets(loop: asyncio.Runner, sidecar: tuple[Liar, GrpcChannel]) -> None:
    liar, channel = sidecar
    liar.reply = plugin_pb2.CallResponse(call_id=channel_next(channel), payload=b"[" * 30_000).SerializeToString()
    with pytest.raises(PluginError, match="not JSON"):
        loop.run(channel.call("score", {}, CALL_S))


# ---- the other side: what a plugin's process reads


@budget(40)
@given(said)
def test_the_child_s_reader(frames: list[tuple[bytes, int]]) -> None:
    """The worker is trusted by its own child, so a broken frame ends the child, with an error and not in a loop."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(CALL_S)
        for body, lie in frames:
            ours.sendall(framed(body, lie))
        ours.close()
        for _ in range(len(frames) + 2):
            try:
                if receive(theirs) is None:
                    return
            except (ValueError, EOFError, OSError, RecursionError, KeyError, TypeError):
                return
        raise AssertionError("more frames than were sent")
