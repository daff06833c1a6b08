"""Event loop on which gRPC's events do not queue behind their own wake-ups."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
_PEEK_BYTES = 64 << 10


class EventLoop(asyncio.SelectorEventLoop):
    """asyncio's event loop, except that it takes all of grpc.aio's wake-ups at once.

    A thread of grpc.aio reads the sockets, and writes a byte to a socket pair for each event. The loop takes one byte
    per turn, upon which all present events are handled; so each costs a turn. If more events come than turns are made,
    the pair is full after some 280 bytes (Linux), and the thread blocks in its write instead of reading sockets. From
    then on a turn brings one event, and with hundreds of peers heartbeats stay unread in the kernel for seconds.
    """

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        if isinstance(fd, socket.socket) and is_grpcs(callback):
            callback = partial(take_all, fd, callback)
        super().add_reader(fd, callback, *args)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run as asyncio.run does, on an EventLoop: for processes with many peers, or few that send much."""
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        return runner.run(main)


def is_grpcs(callback: Any) -> bool:
    """Return whether it handles events of grpc.aio (grpcio 1.85: a partial of the completion queue's method)."""
    handler = getattr(callback, "func", callback)
    return type(getattr(handler, "__self__", None)).__name__ == "PollerCompletionQueue"


def take_all(wakeups: socket.socket, handle: Callable[..., Any], *args: Any) -> None:
    """Take all wake-ups and handle them. An event exists before its byte, so `handle` finds all whose bytes are taken
    here."""
    # Several loops of one process share the socket: another one may have taken the bytes, and then handles the events.
    with suppress(BlockingIOError):
        written = len(wakeups.recv(_PEEK_BYTES, socket.MSG_PEEK))
        if written > 1:
            wakeups.recv(written - 1)
        handle(*args)
