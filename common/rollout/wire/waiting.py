"""Connections of a plain HTTP port that have not asked for anything yet, and cost a descriptor each."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager

WAITING_MOST = 16
AT_ONCE = 16
"""As `backlog` of asyncio.start_server: how many it accepts in one turn, before any of them can be closed."""
QUEUE = 512
"""Connections that the kernel keeps until they are accepted; it drops those above, which then come a second later."""


def lengthen_queue(server: asyncio.Server) -> None:
    """asyncio takes one number for both; the kernel's queue costs nothing."""
    for listening in server.sockets:
        with socket.socket(fileno=os.dup(listening.fileno())) as same:
            same.listen(QUEUE)


class Waiting:
    """Who comes while `most` wait ends the one that has waited for longest: a probe says at once what it wants."""

    def __init__(self, most: int = WAITING_MOST) -> None:
        self._most = most
        self._writers: dict[asyncio.StreamWriter, None] = {}  # in the order they came

    @contextmanager
    def heard(self, writer: asyncio.StreamWriter) -> Generator[None]:
        """While its request is read."""
        while len(self._writers) >= self._most:
            longest = next(iter(self._writers))
            del self._writers[longest]
            longest.transport.abort()
        self._writers[writer] = None
        try:
            yield
        finally:
            self._writers.pop(writer, None)
