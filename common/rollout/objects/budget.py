"""Budget of bytes in memory, shared by everything that passes through a store."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class Budget:
    """Budget in bytes, first come, first served. A share larger than the budget counts as all of it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._left = size
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def share(self, size: int) -> AsyncGenerator[None]:
        """Wait for a share and hold it."""
        size = min(size, self._size)
        if not self.try_take(size):
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((size, turn))
            try:
                await turn
            except BaseException:
                if not turn.cancelled():  # it had come just then
                    self.give(size)
                self._next()
                raise
        try:
            yield
        finally:
            self.give(size)

    def try_take(self, size: int) -> bool:
        """Take a share, which the caller returns. Returns False if there is no room or others wait for it."""
        if self._waiting or size > self._left:
            return False
        self._left -= size
        return True

    def give(self, size: int) -> None:
        self._left += size
        self._next()

    def _next(self) -> None:
        while self._waiting:
            size, turn = self._waiting[0]
            if not turn.cancelled():
                if size > self._left:
                    return
                self._left -= size
                turn.set_result(None)
            self._waiting.popleft()
