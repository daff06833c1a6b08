"""A sandbox whose storage limit is enforced by polling."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod

import structlog

from rollout_worker.sandboxes.errors import SandboxError
from rollout_worker.sandboxes.port import MIB, Files, Made, Sandbox

log = structlog.get_logger()


class WatchedSandbox(Sandbox):
    look_s: float
    """Shortest interval between storage checks, in seconds; they take at most a twentieth of the time."""

    def __init__(self, made: Made, files: Files) -> None:
        super().__init__(made, files)
        self._killing = asyncio.Lock()
        self._storage_hits = 0
        self._storage_allowed = made.spec.limits.storage_mb * MIB
        self._watcher: asyncio.Task[None] | None = None

    @property
    def storage_hits(self) -> int:
        """Number of times the storage limit ended its processes."""
        return self._storage_hits

    @abstractmethod
    async def storage_used(self) -> int:
        """Return the bytes used on disk. Raises SandboxError."""

    @property
    def _may_write(self) -> bool:
        return True

    @property
    def _is_lost(self) -> bool:
        """Whether it is gone for good."""
        return False

    def watch(self) -> None:
        self._watcher = asyncio.ensure_future(self._watch_storage())

    async def _watch_storage(self) -> None:
        """End its processes if it uses more disk than the limit allows."""
        wait = self.look_s
        while not self._is_lost:
            await asyncio.sleep(wait)
            if not self._may_write:
                continue
            begun = time.monotonic()
            try:
                used = await self.storage_used()
                if used > self._storage_allowed:
                    self._storage_hits += 1
                    log.info("sandbox_storage_exceeded", sandbox=self.name, used_mb=used // MIB)
                    await self.kill()
            except SandboxError as error:
                if not self._is_lost:
                    log.warning("sandbox_storage_unknown", sandbox=self.name, error=error.message)
            wait = max(self.look_s, 20 * (time.monotonic() - begun))

    async def allow_more_storage(self) -> None:
        async with self._killing:  # a command started next is not killed with those beyond the limit
            self._storage_allowed = await self.storage_used() + self.spec.limits.storage_mb * MIB

    async def _destroy(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])
        await super()._destroy()
