"""gRPC in memory: production stubs on one side, production services on the other, streams that break in between.

Here are connections, servers, and who reaches whom how fast; one call is in `sim_calls`. Between calls there is no
order, and a single call may be carried out twice.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import grpc
import grpc.aio
from sim_calls import OK, AbortError, Call, Pipe, Status
from sim_loop import DEAD, NodeLoop, Scheduler


class _Details:
    __slots__ = ("method",)

    def __init__(self, method: str) -> None:
        self.method = method


class Server:
    """What the generated `add_..._to_server` functions register with, and the interceptors of a grpc.aio server."""

    def __init__(self, loop: NodeLoop, interceptor: Any) -> None:
        self.loop = loop
        self.listening = True
        self._interceptor = interceptor
        self._handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        pass

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        for name, handler in handlers.items():
            self._handlers[f"/{service}/{name}"] = handler

    async def _find(self, details: Any) -> Any:
        return self._handlers[details.method]

    async def handle(self, call: Call, request: Any) -> None:
        status: Status = (OK, "", ())
        try:
            handler: Any = await self._interceptor.intercept_service(self._find, _Details(call.path))
            if handler.stream_stream is not None:
                await handler.stream_stream(None, call.context)
            elif handler.unary_stream is not None:
                await handler.unary_stream(request, call.context)
            else:
                await call.context.write(await handler.unary_unary(request, call.context))
        except AbortError:
            return
        call.finish(status)


class Channel:
    """A connection of `loop`'s node to `address`; `pem` is the caller's certificate."""

    def __init__(self, network: Network, loop: NodeLoop, address: str, pem: bytes) -> None:
        self._network = network
        self.loop = loop
        self.address = address
        self.pem = pem
        self._closed = False
        self._calls: list[Call] = []

    def _call(self, path: str, timeout: float | None = None) -> Call:
        if self._closed:
            raise grpc.aio.UsageError("Channel is closed.")
        call = self._network.call(self, path, timeout)
        self._calls = [c for c in self._calls if not c.done()]
        self._calls.append(call)
        return call

    def stream_stream(self, path: str, **_: Any) -> Callable[[], Call]:
        def begin() -> Call:
            call = self._call(path)
            call.start(None)
            return call

        return begin

    def unary_stream(self, path: str, **_: Any) -> Callable[[Any], Call]:
        def begin(request: Any) -> Call:
            call = self._call(path)
            call.start(request)
            return call

        return begin

    def unary_unary(self, path: str, **_: Any) -> Callable[..., Call]:
        def begin(request: Any, timeout: float | None = None) -> Call:
            call = self._call(path, timeout)
            call.start(request)
            if self._network.duplicates(path):
                twin = self._call(path, timeout)  # its answer goes nowhere
                twin.start(request)
            return call

        return begin

    async def close(self, grace: float | None = None) -> None:
        self._closed = True
        calls, self._calls = self._calls, []
        for call in calls:
            if grace:
                self.loop.call_later(grace, call.cancel)
            else:
                call.cancel()


class Network:
    """Who reaches whom, and how fast. Names are those of the loops."""

    def __init__(self, scheduler: Scheduler, random: Random) -> None:
        self.scheduler = scheduler
        self.random = random
        self.servers: dict[str, Server] = {}  # by address
        self.calls: dict[Call, None] = {}
        self.blocked: set[tuple[str, str]] = set()  # directed
        self.held: list[Pipe] = []
        self.latency = 0.003
        self.spread: dict[str, float] = {}  # of a node's messages: seconds, while reordering
        self.break_after = 4.0  # a silent connection is given up
        self.twice = 0.0  # probability that a single call is carried out twice
        self.count: Callable[[str], None] = lambda what: None

    def delay(self, source: NodeLoop, sink: NodeLoop) -> float:
        delay = self.latency * (0.5 + self.random.random()) + sink.lag
        if self.spread:
            spread = self.spread.get(source.name, 0.0) or self.spread.get(sink.name, 0.0)
            if spread:
                delay += spread * self.random.random()
                self.count("reorder")
        return delay

    def duplicates(self, path: str) -> bool:
        if self.twice and self.random.random() < self.twice:
            self.count("duplicate")
            return True
        return False

    def call(self, channel: Channel, path: str, timeout: float | None) -> Call:
        server = self.servers[channel.address]
        call = Call(self, channel, server, path, timeout)
        pair = (channel.loop.name, server.loop.name)
        if self.blocked and (pair in self.blocked or pair[::-1] in self.blocked):
            self.scheduler.at(self.scheduler.now + self.break_after, channel.loop, self._give_up, call)
        if server.loop.state == DEAD:
            channel.loop.call_later(self.latency, call._lost, "Connection refused")  # pyright: ignore
        return call

    def _give_up(self, call: Call) -> None:
        pair = (call.client.name, call.server.loop.name)
        if pair in self.blocked or pair[::-1] in self.blocked:
            call.lose("keepalive timeout")

    # ---- faults

    def block(self, a: str, b: str, *, both: bool = True) -> None:
        """Messages from `a` to `b` wait; connections are given up after `break_after`."""
        for pair in ((a, b), (b, a))[: 2 if both else 1]:
            self.blocked.add(pair)
        for call in self._between(a, b):
            self.scheduler.at(self.scheduler.now + self.break_after, call.server.loop, self._give_up, call)

    def unblock(self, a: str, b: str) -> None:
        self.blocked -= {(a, b), (b, a)}
        held, self.held = self.held, []
        for pipe in held:
            if (pipe.source.name, pipe.sink.name) in self.blocked:
                self.held.append(pipe)
            else:
                pipe.release()

    def cut(self, a: str, b: str) -> None:
        """Every connection between them is reset; what was under way is lost."""
        for call in self._between(a, b):
            call.lose("Connection reset by peer")

    def gone(self, name: str) -> None:
        """The process died: the kernel resets its connections."""
        for call in [c for c in self.calls if name in (c.client.name, c.server.loop.name)]:
            call.lose("Connection reset by peer")

    def ended(self, loop: NodeLoop) -> None:
        """One life of a process is over, and what it wrote has been sent."""
        for call in [c for c in self.calls if loop in (c.client, c.server.loop)]:
            call.lose("Connection reset by peer")

    def _between(self, a: str, b: str) -> list[Call]:
        return [c for c in self.calls if {c.client.name, c.server.loop.name} == {a, b}]


Dial = Callable[[str, Any], Channel]
Started = Coroutine[Any, Any, None]
