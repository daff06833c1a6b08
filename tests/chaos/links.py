"""Links of the cluster under test: a TCP proxy per server that can cut, slow and reset what each peer sends through it.

Every server has one address, as in a real network; which link a connection belongs to is found from the process that
opened it. A cut is a black hole: bytes wait as a network's retransmissions would, nobody is told, and what one side
closes meanwhile the other hears of only when the link is whole again, as a reset.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
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
    """The address of one server. `peer_of(port, own)` names who opened the connection from that local port."""

    def __init__(
        self,
        server: str,
        upstream: tuple[str, int],
        peer_of: Callable[[int, int], str],
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
            ends = writer.get_extra_info("peername")[1], writer.get_extra_info("sockname")[1]
            peer = await asyncio.to_thread(self._peer_of, *ends)
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


def opener(port: int, server_port: int, processes: dict[str, int]) -> str:
    """Whose connection comes from local `port`: a name of `processes` (name to pid), or ''."""
    if not Path("/proc/self/fd").exists():
        return next((name for name, pid in processes.items() if _holds(pid, port)), "")
    inode = _inode(port, server_port)
    if not inode:
        return ""  # it has given up already
    wanted = f"socket:[{inode}]"
    for name, pid in processes.items():
        with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if os.readlink(entry.path) == wanted:  # noqa: PTH115 - thousands a second
                        return name
    return ""


_HEADER = struct.Struct("=IHHII")  # nlmsghdr
_REQUEST = struct.Struct("=BBBBI")  # inet_diag_req_v2, up to its id
_ID = struct.Struct(">HH16s16s")  # inet_diag_sockid, up to its interface
_SOCK_DIAG, _BY_FAMILY, _REQUESTED = 4, 20, 1


def _inode(port: int, server_port: int) -> int:
    """Of the socket of that end of a connection on loopback; 0: there is none. One question to the kernel (sock_diag(7)).

    InputReader /proc/net/tcp instead takes a third of a second on a busy machine, in which a peer tries again.
    """
    here = socket.inet_aton("127.0.0.1")
    place = _ID.pack(port, server_port, here, here) + struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
    body = _REQUEST.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + place
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as asking:
        asking.send(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUESTED, 0, 0) + body)
        answer = asking.recv(4096)
    if _HEADER.unpack_from(answer)[1] != _BY_FAMILY:
        return 0
    return struct.unpack_from("=I", answer, _HEADER.size + 68)[0]


def _holds(pid: int, port: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(c.laddr and c.laddr.port == port for c in psutil.Process(pid).net_connections("tcp"))
    return False
