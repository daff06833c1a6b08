"""The loop of processes that have many peers: gRPC's events do not queue behind their own wake-ups."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from functools import partial
from typing import Any

from rollout.wire import event_loop


class PollerCompletionQueue:
    """As grpc.aio has it: an event is queued, then a byte is written; a byte is read, then all events are handled."""

    def __init__(self) -> None:
        self.reads, self.writes = socket.socketpair()
        self.reads.setblocking(False)
        self.events: list[int] = []
        self.meanwhile: list[int] = []
        self.turns: list[list[int]] = []

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self.reads)
        self.reads.close()
        self.writes.close()

    def happens(self, *events: int) -> None:
        for event in events:
            self.events.append(event)
            self.writes.send(b"1")

    def handle(self, loop: Any) -> None:
        assert self.reads.recv(1)
        handled, self.events = self.events, []
        self.turns.append(handled)
        meanwhile, self.meanwhile = self.meanwhile, []
        self.happens(*meanwhile)

    async def listen(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self.reads, partial(self.handle, loop))


def test_all_wake_ups_are_taken_in_one_turn() -> None:
    async def main() -> list[list[int]]:
        queue = PollerCompletionQueue()
        await queue.listen()
        queue.happens(*range(200))
        await asyncio.sleep(0.05)
        queue.happens(200)
        await asyncio.sleep(0.05)
        queue.close()
        return queue.turns

    assert event_loop.run(main()) == [list(range(200)), [200]]


def test_an_event_that_comes_while_others_are_handled_is_handled() -> None:
    async def main() -> list[list[int]]:
        queue = PollerCompletionQueue()
        await queue.listen()
        queue.happens(1, 2)
        queue.meanwhile = [3]
        await asyncio.sleep(0.05)
        queue.close()
        return queue.turns

    assert event_loop.run(main()) == [[1, 2], [3]]


def test_other_readers_are_left_alone() -> None:
    async def main() -> bytes:
        reads, writes = socket.socketpair()
        got: list[bytes] = []
        with reads, writes:
            asyncio.get_running_loop().add_reader(reads, lambda: got.append(reads.recv(1)))
            writes.send(b"abc")
            await asyncio.sleep(0.05)
            asyncio.get_running_loop().remove_reader(reads)
        return b"".join(got)

    assert event_loop.run(main()) == b"abc"


GRPC = """
import asyncio, grpc.aio
from rollout.wire import event_loop

async def echo(request, context):
    return request

async def main():
    server = grpc.aio.server()
    handlers = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        print((await channel.unary_unary("/test.Echo/Echo")(b"here")).decode(), flush=True)
    await server.stop(None)

take_all, taken = event_loop.take_all, []
event_loop.take_all = lambda *args: (taken.append(1), take_all(*args))
event_loop.run(main())
print("taken" if taken else "not known")
"""


def test_grpcs_own_wake_ups_are_known_when_they_are_seen() -> None:
    """Another grpcio may name things otherwise; then this fails, and large clusters are slow again."""
    ran = subprocess.run([sys.executable, "-c", GRPC], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.split() == ["here", "taken"]
