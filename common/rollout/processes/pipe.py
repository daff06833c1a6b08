"""Event loop's end of a socket pair to another process, in frames (`framing`), and of a pipe that it prints to."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import IO, Any, Self, cast

from rollout.processes.framing import FRAME_MAX, HEAD, MESSAGE


@contextmanager
def inherited_socket() -> Generator[tuple[socket.socket, int]]:
    """Yield our end of a pair, and the descriptor that a child started in this context inherits.

    Both are closed if the child cannot be started.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            yield ours, theirs.fileno()
        except BaseException:
            ours.close()
            raise


class Printed(asyncio.Protocol):
    """Output of a process through a pipe, passed to `tell`.

    Unlike asyncio's own process streams, it can be closed while a remaining process still holds the other end. `end` is
    done when no process does.
    """

    def __init__(self, tell: Callable[[bytes], None]) -> None:
        self._tell = tell
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def over(self, pipe: IO[bytes]) -> Self:
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self, pipe)
        return self

    def data_received(self, data: bytes) -> None:
        self._tell(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.end.done():
            self.end.set_result(None)

    def close(self) -> None:
        self._transport.close()


class Pipe(asyncio.Protocol):
    """Frames from and to a process.

    Calls `on_frame(kind, body)` for each frame, and `on_lost()` once, when the other side has gone or broke the
    framing: a frame of more than `limit` bytes is `refused`. `head` is the header of another framing: the length, then
    the kind, if any.
    """

    def __init__(
        self,
        on_frame: Callable[[int, bytes], None],
        on_lost: Callable[[], None],
        limit: int = FRAME_MAX,
        head: struct.Struct = HEAD,
    ) -> None:
        self.refused = 0
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._limit = limit
        self._head = head
        self._buffer = bytearray()
        self._broken = False
        self._transport: asyncio.Transport | None = None

    async def over(self, connection: socket.socket) -> Self:
        """Read from `connection`, which this pipe owns from now on."""
        connection.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=connection)
        return self

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        buffer, head = self._buffer, self._head
        buffer += data
        at = 0
        try:
            while not self._broken and len(buffer) - at >= head.size:
                size, *kind = head.unpack_from(buffer, at)
                if size > self._limit:
                    self.refused = size
                    self.abort()
                    return
                end = at + head.size + size
                if len(buffer) < end:
                    break
                body = bytes(memoryview(buffer)[at + head.size : end])
                at = end
                self._on_frame(kind[0] if kind else MESSAGE, body)
        finally:
            del buffer[: len(buffer) if self._broken else at]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_lost()

    def send(self, kind: int, body: bytes) -> None:
        """Send a frame without waiting; nothing is sent once the other side has gone."""
        self.send_frame(HEAD.pack(len(body), kind), body)

    def send_frame(self, *pieces: bytes) -> None:
        """Send a frame that already has its header."""
        if self._transport is not None:
            self._transport.writelines(pieces)

    def send_message(self, message: Mapping[str, Any]) -> None:
        self.send(MESSAGE, json.dumps(message).encode())

    def pause(self, seconds: float) -> None:
        """Stop reading for `seconds`, or until `resume`."""
        if self._transport is not None:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(seconds, self.resume)

    def resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once; unsent and unread data is dropped."""
        self._broken = True
        if self._transport is not None:
            self._transport.abort()
