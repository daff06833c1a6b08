"""One RPC in memory: two ordered pipes, and the halves of client and server.

Messages are delayed, held back by a partition and lost when the connection breaks, never reordered or repeated within
a stream, as HTTP/2 on TCP has it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio
from sim_loop import DEAD, NodeLoop

if TYPE_CHECKING:
    from sim_network import Channel, Network, Server

EOF: Any = cast(Any, grpc.aio).EOF
OK = grpc.StatusCode.OK
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
Status = tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]


WAITS_EVERY = 4  # writes


class AbortError(Exception):
    """`context.abort`."""


class Pipe:
    """One direction of a call."""

    __slots__ = ("call", "held", "last", "sink", "source", "take", "written")

    def __init__(self, call: Call, source: NodeLoop, sink: NodeLoop, take: Callable[[Any], None]) -> None:
        self.call = call
        self.source = source
        self.sink = sink
        self.take = take
        self.last = 0.0
        self.written = 0
        self.held: list[Any] = []

    def send(self, message: Any) -> None:
        network = self.call.network
        if (self.source.name, self.sink.name) in network.blocked:
            if not self.held:
                network.held.append(self)
            self.held.append(message)
            return
        due = network.scheduler.now + network.delay(self.source, self.sink)
        if due < self.last:
            due = self.last
        self.last = due
        network.scheduler.at(due, self.sink, self.take, message)

    async def room(self) -> None:
        """A write waits now and then, and other things happen meanwhile."""
        self.written += 1
        if self.written % WAITS_EVERY == 0:
            await asyncio.sleep(0)

    def release(self) -> None:
        held, self.held = self.held, []
        for message in held:
            self.send(message)


class Call:
    """Both halves of one RPC; the methods are those of grpc.aio's client calls that the product uses."""

    def __init__(self, network: Network, channel: Channel, server: Server, path: str, timeout: float | None) -> None:
        self.network = network
        self.channel = channel
        self.client, self.server, self.path = channel.loop, server, path
        self.up = Pipe(self, channel.loop, server.loop, self._at_server)
        self.down = Pipe(self, server.loop, channel.loop, self._at_client)
        self.status: Status | None = None  # as the client knows it
        self.locally_cancelled = False
        self._replies: deque[Any] = deque()
        self._reader: asyncio.Future[Any] | None = None
        self._ended: list[asyncio.Future[None]] = []
        self._half_closed = False
        self.context = Context(self)
        self.task: Any = None
        self.over_at_server = False
        self._cut = False
        network.calls[self] = None
        if timeout is not None:
            channel.loop.call_later(timeout, self._end, (grpc.StatusCode.DEADLINE_EXCEEDED, "too late", ()))

    # ---- the client's half

    def done(self) -> bool:
        return self.status is not None

    def cancel(self) -> bool:
        if self.status is not None:
            return False
        self.locally_cancelled = True
        self._end((grpc.StatusCode.CANCELLED, "Locally cancelled by application!", ()))
        return True

    async def write(self, message: Any) -> None:
        if self.status is not None or self._half_closed:
            raise asyncio.InvalidStateError("RPC already finished.")
        self.up.send(("message", message))
        await self.up.room()

    async def done_writing(self) -> None:
        if self.status is None:
            self._half_closed = True
            self.up.send(("eof", None))

    async def read(self) -> Any:
        if not self._replies and self.status is None:
            future = self._reader = self.client.create_future()
            try:
                await future
            except asyncio.CancelledError:
                self.cancel()
                raise
        if self._replies:
            return self._replies.popleft()
        assert self.status is not None
        if self.locally_cancelled:
            raise asyncio.CancelledError
        self._raise()
        return EOF

    def _raise(self) -> None:
        code, details, metadata = cast(Status, self.status)
        if code is not OK:
            raise grpc.aio.AioRpcError(code, cast(Any, ()), cast(Any, metadata), details=details)

    async def _until_ended(self) -> None:
        if self.status is None:
            future = self.client.create_future()
            self._ended.append(future)
            await future

    async def code(self) -> grpc.StatusCode:
        await self._until_ended()
        return cast(Status, self.status)[0]

    async def details(self) -> str:
        await self._until_ended()
        return cast(Status, self.status)[1]

    async def trailing_metadata(self) -> Any:
        await self._until_ended()
        return cast(Status, self.status)[2]

    async def initial_metadata(self) -> Any:
        return ()

    def __await__(self) -> Any:
        return self._unary().__await__()

    async def _unary(self) -> Any:
        try:
            await self._until_ended()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self.locally_cancelled:
            raise asyncio.CancelledError
        self._raise()
        return self._replies.popleft()

    def _at_client(self, frame: tuple[str, Any]) -> None:
        if self.status is not None or self._cut:
            return
        kind, body = frame
        if kind == "message":
            self._replies.append(body)
            self._wake()
        else:
            self._end(body, told=True)

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    def _end(self, status: Status, told: bool = False) -> None:
        if self.status is not None:
            return
        self.status = status
        if not told:
            if status[0] is grpc.StatusCode.CANCELLED or status[0] is grpc.StatusCode.DEADLINE_EXCEEDED:
                self._replies.clear()
            self.up.send(("reset", None))
        self._wake()
        for future in self._ended:
            if not future.done():
                future.set_result(None)
        self._ended.clear()
        if self.over_at_server:
            self.network.calls.pop(self, None)

    # ---- the server's half

    def start(self, request: Any) -> None:
        self.up.send(("start", request))

    def _at_server(self, frame: tuple[str, Any]) -> None:
        if self._cut:
            return
        kind, body = frame
        if kind == "message":
            self.context.arrived(body)
        elif kind == "eof":
            self.context.arrived(EOF)
        elif kind == "start":
            if not self.server.listening:
                self.finish((UNAVAILABLE, "Connection refused", ()))
            elif self.task is None and not self.over_at_server:
                self.task = self.server.loop.create_task(self.server.handle(self, body))
        else:
            self.broken_at_server()

    def broken_at_server(self) -> None:
        """Reset, or the connection is gone: the handler is cancelled, as grpc.aio does."""
        self.over_at_server = True
        if self.task is not None:
            self.task.cancel()
        if self.status is not None:
            self.network.calls.pop(self, None)

    def finish(self, status: Status) -> None:
        if not self.over_at_server:
            self.over_at_server = True
            self.down.send(("end", status))
            if self.status is not None:
                self.network.calls.pop(self, None)

    # ---- the connection

    def lose(self, reason: str) -> None:
        """Both ends find out by themselves, if they live."""
        self.up.held.clear()
        self.down.held.clear()
        self._cut = True
        for loop, act in ((self.client, self._lost), (self.server.loop, self.broken_at_server)):
            if loop.state != DEAD:
                args = (reason,) if act == self._lost else ()
                loop.call_later(self.network.random.random() * 0.01, cast(Any, act), *args)

    def _lost(self, reason: str) -> None:
        self._end((UNAVAILABLE, reason, ()), told=True)


class Context:
    """The server's side of a call, as grpc.aio's ServicerContext."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._inbox: deque[Any] = deque()
        self._reader: asyncio.Future[Any] | None = None

    def peer(self) -> str:
        return "ipv4:10.0.0.1:1"

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_pem_cert": [self._call.channel.pem]}

    def arrived(self, message: Any) -> None:
        self._inbox.append(message)
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    async def read(self) -> Any:
        if not self._inbox:
            future = self._reader = self._call.server.loop.create_future()
            await future
        return self._inbox[0] if self._inbox[0] is EOF else self._inbox.popleft()

    async def write(self, message: Any) -> None:
        if not self._call.over_at_server:
            self._call.down.send(("message", message))
            await self._call.down.room()

    async def send_initial_metadata(self, metadata: Any) -> None:
        pass

    async def abort(self, code: grpc.StatusCode, details: str = "", metadata: Any = ()) -> None:
        self._call.finish((code, details, tuple(metadata)))
        raise AbortError(details)
