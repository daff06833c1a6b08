"""A link to a server that can go silent, or break in the middle of a conversation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit, urlunsplit


class Link:
    """Forwards connections to the server.

    After `cut` nothing arrives any more, and nothing is closed, until `heal`. Every connection is broken off when the
    count of `messages` from this side comes to one of `break_at`.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._whole = asyncio.Event()
        self._whole.set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.StreamWriter] = set()
        self.messages = 0
        self.break_at: set[int] = set()
        self.server: asyncio.Server

    def cut(self) -> None:
        self._whole.clear()

    def heal(self) -> None:
        self._whole.set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._whole.wait()
        there = await asyncio.open_connection(*self._target)
        self._ends.add(writer)
        for source, sink, counted in ((reader, there[1], True), (there[0], writer, False)):
            task = asyncio.create_task(self._pump(source, sink, counted))
            self._pumps.add(task)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, counted: bool) -> None:
        try:
            with contextlib.suppress(OSError):
                while data := await source.read(65536):
                    await self._whole.wait()
                    if counted:
                        self._count()
                    sink.write(data)
                    await sink.drain()
        finally:
            self._ends.discard(sink)
            sink.close()

    def _count(self) -> None:
        self.messages += 1
        if self.messages in self.break_at:
            for end in self._ends:
                end.transport.abort()

    async def close(self) -> None:
        self.server.close()
        for task in self._pumps:
            task.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)


@asynccontextmanager
async def link_to(url: str) -> AsyncIterator[tuple[Link, str]]:
    parts = urlsplit(url)
    assert parts.hostname and parts.port
    link = Link(parts.hostname, parts.port)
    link.server = await asyncio.start_server(link.accept, "127.0.0.1", 0)
    port = link.server.sockets[0].getsockname()[1]
    try:
        yield link, urlunsplit(parts._replace(netloc=f"{parts.username}@127.0.0.1:{port}"))
    finally:
        link.heal()
        await link.close()
