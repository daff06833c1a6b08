"""Stream cut into parts of equal size, in reused buffers."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from rollout.model.errors import InputError

BUFFERS = 2
"""Parts in memory: one is filled while the other is sent, or both are sent."""


class Part:
    """One part. `number` counts from 1; `offset` is that of its first byte in the whole. `free` returns the buffer."""

    def __init__(
        self, number: int, offset: int, buffer: bytearray, length: int, home: asyncio.Queue[bytearray]
    ) -> None:
        self.number = number
        self.offset = offset
        self.length = length
        self._buffer = buffer
        self._home = home

    @property
    def data(self) -> memoryview:
        return memoryview(self._buffer)[: self.length]

    def free(self) -> None:
        self._home.put_nowait(self._buffer)


async def whole_of(chunks: AsyncIterator[bytes], size: int) -> list[bytes]:
    """Return all `chunks`. Raises InputError if the number of bytes differs."""
    return [chunk async for chunk in _counted(chunks, size)]


async def parts_of(chunks: AsyncIterator[bytes], size: int, part_bytes: int) -> AsyncGenerator[Part]:
    """Yield `size` bytes as parts, the last one shorter; the next is filled when a buffer is free.

    Raises InputError, before the last part, if `chunks` has another number of bytes.
    """
    home: asyncio.Queue[bytearray] = asyncio.Queue()
    for _ in range(BUFFERS):
        home.put_nowait(bytearray())  # takes room when it is first filled

    async def fresh() -> bytearray:
        buffer = await home.get()
        return buffer or bytearray(min(part_bytes, size))

    buffer, filled, number, offset = await fresh(), 0, 1, 0
    async with aclosing(_counted(chunks, size)) as counted:
        async for chunk in counted:
            at = 0
            while at < len(chunk):
                if filled == part_bytes:  # only when more comes: the last part is given when all is counted
                    yield Part(number, offset, buffer, filled, home)
                    buffer, filled, number, offset = await fresh(), 0, number + 1, offset + filled
                taken = min(len(chunk) - at, part_bytes - filled)
                buffer[filled : filled + taken] = memoryview(chunk)[at : at + taken]
                filled, at = filled + taken, at + taken
    yield Part(number, offset, buffer, filled, home)


async def _counted(chunks: AsyncIterator[bytes], size: int) -> AsyncGenerator[bytes]:
    seen = 0
    async for chunk in chunks:
        seen += len(chunk)
        if seen > size:
            raise InputError(f"the body was to have {size} bytes and has more")
        yield chunk
    if seen != size:
        raise InputError(f"the body was to have {size} bytes and has {seen}")


class Body(io.BytesIO):
    """Part of a buffer that an HTTP client sends without copying it. `idle_s` is the time since the last read; 0 while
    it waits for a connection."""

    def __init__(self, data: memoryview | bytes) -> None:
        super().__init__()
        self._data = memoryview(data)
        self._at = 0
        self._moved: float | None = None

    @property
    def idle_s(self) -> float:
        return 0.0 if self._moved is None else time.monotonic() - self._moved

    @property
    def sent(self) -> bool:
        return self._at == len(self._data)

    def read(self, size: int | None = -1, /) -> bytes:
        end = len(self._data) if size is None or size < 0 else min(len(self._data), self._at + size)
        found = bytes(self._data[self._at : end])
        self._at = end
        self._moved = time.monotonic()
        return found

    def seek(self, offset: int, whence: int = 0, /) -> int:
        base = {0: 0, 1: self._at, 2: len(self._data)}[whence]
        self._at = max(0, min(len(self._data), base + offset))
        return self._at

    def tell(self) -> int:
        return self._at

    def getbuffer(self) -> memoryview:
        return self._data[:]

    def getvalue(self) -> bytes:
        return bytes(self._data)

    def __iter__(self) -> Any:
        while piece := self.read(1 << 16):
            yield piece
