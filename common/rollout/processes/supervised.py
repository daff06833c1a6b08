"""Child process that is restarted when it dies."""

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
    """Supervises a process from `watch` to `unwatch` or `stop`. `clock` returns monotonic seconds."""

    def __init__(self, backoff: Backoff, clock: Callable[[], float] = time.monotonic) -> None:
        self.backoff = backoff
        self._clock = clock
        self._child: Child | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Pid of the last started process, or 0."""
        return self._child.pid if self._child is not None else 0

    @abstractmethod
    async def launch(self) -> None:
        """Start the process and return once it works. Raises OSError or RolloutError if it does not."""

    @abstractmethod
    def restarts(self, end: int | Exception, pause_s: float) -> bool:
        """Report that it ended with this exit code, or that `launch` failed; return whether to launch it again after
        the pause."""

    async def ended(self) -> int:
        """Wait for its end and return its exit code."""
        assert self._child is not None
        return await self._child.wait()

    def watch(self, *, launched: bool = True) -> None:
        self._watcher = asyncio.create_task(self._supervise(launched))

    def unwatch(self) -> Awaitable[object]:
        """Launch nothing from now on. The result is done when a launch in progress is over."""
        watchers = [] if self._watcher is None else [self._watcher]
        for watcher in watchers:
            watcher.cancel()
        return asyncio.gather(*watchers, return_exceptions=True)

    async def stop(self) -> None:
        """Close its stdin, which ends it; kill it if that takes long."""
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
