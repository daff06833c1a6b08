"""The proxy does to a connection what the campaign says it does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from chaos.links import DOWN, UP, Front, Link, Shape, opener

PEER = "worker-1"
SILENT_S = 0.3
"""How long nothing must come; whatever came at all would be there in a millisecond."""


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    """In front of a server that answers each line in capitals."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                writer.write(line.upper())
        except OSError:
            pass  # reset
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    made = await Front("server", server.sockets[0].getsockname(), lambda *_: PEER, random.Random(1)).open()
    yield made
    await made.close()
    server.close()


@pytest.fixture
def link(front: Front) -> Link:
    return front.link(PEER)


class Peer:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, text: str) -> str:
        self.writer.write(f"{text}\n".encode())
        return (await self.reader.readline()).decode().strip()

    async def hears_nothing(self) -> bool:
        try:
            await asyncio.wait_for(self.reader.read(1), SILENT_S)
        except TimeoutError:
            return True
        return False


Connect = Callable[[], Awaitable[Peer]]


@pytest.fixture
async def connect(front: Front) -> AsyncIterator[Connect]:
    """Opens a connection through the front."""
    peers: list[Peer] = []

    async def opened() -> Peer:
        host, _, port = front.address.rpartition(":")
        peers.append(Peer(*await asyncio.open_connection(host, int(port))))
        return peers[-1]

    yield opened
    for peer in peers:
        peer.writer.close()
        with contextlib.suppress(OSError):
            await peer.writer.wait_closed()


async def test_a_whole_link_passes_everything(connect: Connect, link: Link) -> None:
    peer = await connect()
    assert await peer.ask("hello") == "HELLO"
    assert (link.passed_bytes, link.held_bytes, link.connections) == (12, 0, 1)


@pytest.mark.parametrize(("directions", "held"), [((UP, DOWN), 4), ((UP,), 4), ((DOWN,), 4)])
async def test_what_a_cut_holds_arrives_when_it_is_healed(
    connect: Connect, link: Link, directions: tuple[int, ...], held: int
) -> None:
    peer = await connect()
    assert await peer.ask("one") == "ONE"
    link.cut(*directions)
    peer.writer.write(b"two\n")
    assert await peer.hears_nothing()
    assert link.held_bytes == held  # the question, or the answer
    link.heal()
    assert (await peer.reader.readline()) == b"TWO\n"


async def test_a_connection_opened_during_a_cut_waits(connect: Connect, link: Link) -> None:
    link.cut(DOWN)
    peer = await connect()
    peer.writer.write(b"hello\n")
    assert await peer.hears_nothing()
    assert (link.held_connections, link.connections) == (1, 0)
    link.heal()
    assert (await peer.reader.readline()) == b"HELLO\n"


async def test_nobody_hears_of_an_end_during_a_cut(connect: Connect, link: Link) -> None:
    peer = await connect()
    assert await peer.ask("one") == "ONE"
    link.cut(UP, DOWN)
    peer.writer.close()
    await asyncio.sleep(SILENT_S)
    assert link.connections == 1
    link.heal()
    for _ in range(100):
        if link.connections == 0:
            break
        await asyncio.sleep(0.05)
    assert link.connections == 0


async def test_a_reset_is_no_orderly_end(connect: Connect, link: Link) -> None:
    peer = await connect()
    assert await peer.ask("one") == "ONE"
    assert link.reset() == 1
    with pytest.raises(ConnectionResetError):
        await peer.reader.read()
    assert link.resets == 1


async def test_a_slow_link_delays_and_keeps_the_order(connect: Connect, link: Link) -> None:
    peer = await connect()
    link.shape = Shape(delay_s=0.1, jitter_s=0.1, bytes_per_s=1000, stall_rate=0.5, stall_s=0.1)
    began = time.monotonic()
    for n in range(3):
        peer.writer.write(f"line {n}\n".encode())
        await asyncio.sleep(0.01)
    assert [await peer.reader.readline() for _ in range(3)] == [b"LINE 0\n", b"LINE 1\n", b"LINE 2\n"]
    assert time.monotonic() - began >= 0.2  # once each way
    assert link.slowed_bytes == 42 and link.slowed_s >= 0.2


async def test_a_server_that_is_gone_is_a_reset(front: Front, connect: Connect) -> None:
    front.upstream = ("127.0.0.1", 1)
    peer = await connect()
    with pytest.raises(ConnectionResetError):
        await peer.reader.read()


async def test_a_connection_is_told_by_the_process_that_opened_it(front: Front, connect: Connect) -> None:
    peer = await connect()
    port = peer.writer.get_extra_info("sockname")[1]
    own = int(front.address.rpartition(":")[2])
    assert opener(port, own, {"nobody": 1 << 22, "me": os.getpid()}) == "me"
    assert opener(port, own, {"another": os.getppid()}) == ""
    assert opener(1, own, {"me": os.getpid()}) == ""
