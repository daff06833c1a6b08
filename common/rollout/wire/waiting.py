"""Limit on connections of a plain HTTP port without a request, each of which costs a descriptor."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager

WAITING_MOST = 16
AT_ONCE = 16
"""Connections that asyncio accepts in one turn, before any can be closed (`backlog` of asyncio.start_server)."""
QUEUE = 512
"""Connections that the kernel keeps until they are accepted; further ones are dropped and retried a second later."""


def lengthen_queue(server: asyncio.Server) -> None:
    """Lengthen the kernel's queue, which costs nothing; asyncio uses one number for both."""
    for listening in server.sockets:
        with socket.socket(fileno=os.dup(listening.fileno())) as same:
            same.listen(QUEUE)


class Waiting:
    """Waiting connections. A new one beyond `most` ends the oldest, because a probe sends its request at once."""

    def __init__(self, most: int = WAITING_MOST) -> None:
        self._most = most
        self._writers: dict[asyncio.StreamWriter, None] = {}  # in the order they came

    @contextmanager
    def heard(self, writer: asyncio.StreamWriter) -> Generator[None]:
        """Count a connection as waiting while its request is read."""
        while len(self._writers) >= self._most:
            longest = next(iter(self._writers))
            del self._writers[longest]
            longest.transport.abort()
        self._writers[writer] = None
        try:
            yield
        finally:
            self._writers.pop(writer, None)
