"""Links of the cluster under test: a TCP proxy per server that can cut, slow and reset what each peer sends through it.

Every server has one address, as in a real network; which link a connection belongs to is found from the process that
opened it. A cut is a black hole: bytes wait as a network's retransmissions would, nobody is told, and what one side
closes meanwhile the other hears of only when the link is whole again, as a reset.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

UP, DOWN = 0, 1
"""From the peer to the server, and back."""

CHUNK = 64 * 1024
QUEUE_CHUNKS = 16


@dataclass(frozen=True)
class Shape:
    """A bad line: seconds of delay per chunk, bytes per second, and stalls as lost packets would make them."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = 0.0
    stall_rate: float = 0.0
    stall_s: float = 0.0

    def pause(self, size: int, dice: random.Random) -> float:
        pause = self.delay_s + self.jitter_s * dice.random()
        if self.bytes_per_s:
            pause += size / self.bytes_per_s
        if dice.random() < self.stall_rate:
            pause += self.stall_s
        return pause


@dataclass(eq=False)
class Link:
    """What one peer and one server send each other. Counters only grow; they are the evidence of a fault."""

    peer: str
    server: str
    shape: Shape | None = None
    held_bytes: int = 0  # that met a cut
    held_connections: int = 0  # opened during a cut
    slowed_bytes: int = 0
    slowed_s: float = 0.0
    passed_bytes: int = 0
    resets: int = 0
    _whole: tuple[asyncio.Event, asyncio.Event] = field(default_factory=lambda: (asyncio.Event(), asyncio.Event()))
    _pipes: set[_Pipe] = field(default_factory=lambda: set[_Pipe]())

    def __post_init__(self) -> None:
        for event in self._whole:
            event.set()

    @property
    def name(self) -> str:
        return f"{self.peer}>{self.server}"

    def cut(self, *directions: int) -> None:
        for direction in directions:
            self._whole[direction].clear()

    def heal(self) -> None:
        self.shape = None
        for event in self._whole:
            event.set()

    def is_cut(self, direction: int) -> bool:
        return not self._whole[direction].is_set()

    async def whole(self, direction: int | None = None) -> None:
        """Returns when nothing, or that direction, is cut."""
        for wanted, event in enumerate(self._whole):
            if direction in (None, wanted):
                await event.wait()

    def reset(self) -> int:
        """RST both ends of every connection; how many."""
        pipes = list(self._pipes)
        for pipe in pipes:
            pipe.abort()
        self.resets += len(pipes)
        return len(pipes)

    @property
    def connections(self) -> int:
        return len(self._pipes)


class _Pipe:
    """One connection through the proxy."""

    def __init__(self, link: Link, near: asyncio.StreamWriter, far: asyncio.StreamWriter, dice: random.Random) -> None:
        self._link = link
        self._ends = (near, far)
        self._dice = dice

    def abort(self) -> None:
        for writer in self._ends:
            _reset(writer)

    async def run(self, near: asyncio.StreamReader, far: asyncio.StreamReader) -> None:
        link = self._link
        link._pipes.add(self)  # pyright: ignore[reportPrivateUsage]
        ways = [
            asyncio.create_task(self._pump(near, self._ends[1], UP)),
            asyncio.create_task(self._pump(far, self._ends[0], DOWN)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_EXCEPTION)
            if any(way.done() and way.exception() for way in ways):
                await link.whole()
                self.abort()
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            link._pipes.discard(self)  # pyright: ignore[reportPrivateUsage]
            for writer in self._ends:
                writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: int) -> None:
        """OSError when either end is gone; returns after an end of stream was passed on."""
        queue: asyncio.Queue[tuple[float, bytes] | OSError] = asyncio.Queue(QUEUE_CHUNKS)
        filling = asyncio.create_task(self._fill(reader, queue, direction))
        try:
            while True:
                got = await queue.get()
                if isinstance(got, OSError):
                    raise got
                due, data = got
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                await self._link.whole(direction)
                if not data:
                    with contextlib.suppress(OSError):
                        writer.write_eof()
                    return
                writer.write(data)
                await writer.drain()
        finally:
            filling.cancel()
            await asyncio.gather(filling, return_exceptions=True)

    async def _fill(
        self, reader: asyncio.StreamReader, queue: asyncio.Queue[tuple[float, bytes] | OSError], direction: int
    ) -> None:
        link, due, data = self._link, 0.0, b"?"
        while data:
            try:
                data = await reader.read(CHUNK)
            except OSError as error:
                await queue.put(error)
                return
            if link.is_cut(direction):
                link.held_bytes += len(data)
                await link.whole(direction)
            link.passed_bytes += len(data)
            now = time.monotonic()
            if link.shape is not None:
                pause = link.shape.pause(len(data), self._dice)
                link.slowed_bytes += len(data)
                link.slowed_s += pause
                due = max(now + pause, due)  # never overtakes what went before
            await queue.put((max(now, due), data))


def _reset(writer: asyncio.StreamWriter) -> None:
    sock: socket.socket | None = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class Front:
    """The address of one server. `peer_of(port)` names who opened a connection from that local port."""

    def __init__(
        self,
        server: str,
        upstream: tuple[str, int],
        peer_of: Callable[[int], str],
        dice: random.Random,
        on_open: Callable[[str, int], None] = lambda peer, port: None,
    ) -> None:
        self.server = server
        self.upstream = upstream
        self.links: dict[str, Link] = {}
        self.address = ""
        self._peer_of = peer_of
        self._on_open = on_open
        self._dice = dice
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def link(self, peer: str) -> Link:
        return self.links.setdefault(peer, Link(peer, self.server))

    async def open(self) -> Front:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for link in self.links.values():
            link.heal()
            link.reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_writer: asyncio.StreamWriter | None = None
        try:
            peer = self._peer_of(writer.get_extra_info("peername")[1])
            link = self.link(peer)
            if link.is_cut(UP) or link.is_cut(DOWN):
                link.held_connections += 1
                await link.whole()
            far_reader, far_writer = await asyncio.open_connection(*self.upstream)
            self._on_open(peer, far_writer.get_extra_info("sockname")[1])
            await _Pipe(link, writer, far_writer, self._dice).run(reader, far_reader)
        except OSError:
            _reset(writer)
        finally:
            for end in (writer, far_writer):
                if end is not None and not end.is_closing():
                    _reset(end)


def opener(port: int, processes: dict[str, int]) -> str:
    """Whose connection comes from local `port`: a name of `processes` (name to pid), or ''."""
    tables = [table for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if table.exists()]
    if not tables:
        return next((name for name, pid in processes.items() if _holds(pid, port)), "")
    # As psutil does, but the tables once for all: a lookup must cost less than the time in which a peer tries again.
    local = f":{port:04X}"
    lines = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    inodes = {fields[9] for fields in lines if fields[1].endswith(local)}
    wanted = {f"socket:[{inode}]" for inode in inodes - {"0"}}
    if not wanted:
        return ""  # it has given up already
    for name, pid in processes.items():
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(entry.readlink()) in wanted:
                        return name
    return ""


def _holds(pid: int, port: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(c.laddr and c.laddr.port == port for c in psutil.Process(pid).net_connections("tcp"))
    return False
