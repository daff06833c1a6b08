"""A child process that is started again when it dies."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable

from rollout.model.errors import RolloutError
from rollout.processes.backoff import Backoff
from rollout.processes.child import Child

STOP_LIMIT_S = 5.0


class Supervised(ABC):
    """From `watch` to `unwatch` or `stop`. `clock`: monotonic seconds."""

    def __init__(self, backoff: Backoff, clock: Callable[[], float] = time.monotonic) -> None:
        self.backoff = backoff
        self._clock = clock
        self._child: Child | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Of the process that was started last; 0: none was."""
        return self._child.pid if self._child is not None else 0

    @abstractmethod
    async def launch(self) -> None:
        """Start the process; returns once it works. OSError or RolloutError: it does not."""

    @abstractmethod
    def restarts(self, end: int | Exception, pause_s: float) -> bool:
        """Say that it ended with this exit code, or that `launch` failed. Whether it is launched
        again, after the pause."""

    async def ended(self) -> int:
        """Its exit code, once it has ended."""
        assert self._child is not None
        return await self._child.wait()

    def watch(self, *, launched: bool = True) -> None:
        self._watcher = asyncio.create_task(self._supervise(launched))

    def unwatch(self) -> Awaitable[object]:
        """Nothing is launched from now on; done when a launch that was under way is over."""
        watchers = [] if self._watcher is None else [self._watcher]
        for watcher in watchers:
            watcher.cancel()
        return asyncio.gather(*watchers, return_exceptions=True)

    async def stop(self) -> None:
        """Closes its stdin, which ends it; kills it if that takes long."""
        await self.unwatch()
        if self._child is not None:
            await self._child.end(STOP_LIMIT_S)

    async def _supervise(self, launched: bool) -> None:
        while True:
            try:
                if not launched:
                    await self.launch()
                began = self._clock()
                end = await self.ended()
                pause = self.backoff.pause_s(self._clock() - began)
            except (OSError, RolloutError) as error:
                end, pause = error, self.backoff.pause_s()
            if not self.restarts(end, pause):
                return
            launched = False
            await asyncio.sleep(pause)
