"""Pipes between this event loop and processes in sandboxes."""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import os
import termios
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

CHUNK = 1 << 18
_F_SETPIPE_SZ = 1031  # include/uapi/linux/fcntl.h


def pipe() -> tuple[int, int]:
    """Return (read end, write end), not inheritable; as large as possible, so that a busy loop delays nobody."""
    reader, writer = os.pipe()
    with contextlib.suppress(OSError):
        fcntl.fcntl(writer, _F_SETPIPE_SZ, 1 << 20)
    return reader, writer


async def _ready(fd: int, also: asyncio.Future[Any] | None, writing: bool) -> None:
    """Wait until the descriptor is ready or `also` is done."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
    add(fd, lambda: ready.done() or ready.set_result(None))
    try:
        waited: list[asyncio.Future[Any] | asyncio.Future[None]] = [ready] if also is None else [ready, also]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    finally:
        remove(fd)
        ready.cancel()


async def read_until(
    fd: int, ended: asyncio.Future[Any] | None, feed: Callable[[bytes], Awaitable[None] | None]
) -> bool:
    """Feed data until the end (True), or until what was in the pipe when `ended` was done has been read (False)."""
    os.set_blocking(fd, False)
    left: int | None = None
    while left is None or left > 0:
        if left is None and ended is not None and ended.done():
            left = _waiting(fd)
            continue
        try:
            data = os.read(fd, CHUNK if left is None else min(CHUNK, left))
        except BlockingIOError:
            await _ready(fd, ended, writing=False)
            continue
        if not data:
            return True
        if left is not None:
            left -= len(data)
        fed = feed(data)
        if fed is not None:
            await fed
    return False


def _waiting(fd: int) -> int:
    """Return the number of bytes in a pipe."""
    count = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, count)
    return count[0]


async def read_all(fd: int, limit: int | None = None) -> bytes:
    data = bytearray()

    def feed(piece: bytes) -> None:
        data.extend(piece if limit is None else piece[: limit - len(data)])

    await read_until(fd, None, feed)
    return bytes(data)


async def write_all(fd: int, source: bytes | AsyncIterator[bytes]) -> None:
    """Write all of `source`, or until the reader closes its end, which is no error."""
    os.set_blocking(fd, False)
    with contextlib.suppress(BrokenPipeError):
        if isinstance(source, bytes):
            await _write(fd, source)
        else:
            async for piece in source:
                await _write(fd, piece)


async def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view[:CHUNK]) :]
        except BlockingIOError:
            await _ready(fd, None, writing=True)
