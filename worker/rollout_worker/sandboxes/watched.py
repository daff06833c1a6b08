"""A sandbox whose storage limit is kept by looking now and then."""

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
    """At its storage, at most so often, and at most a twentieth of the time."""

    def __init__(self, made: Made, files: Files) -> None:
        super().__init__(made, files)
        self._killing = asyncio.Lock()
        self._storage_hits = 0
        self._storage_allowed = made.spec.limits.storage_mb * MIB
        self._watcher: asyncio.Task[None] | None = None

    @property
    def storage_hits(self) -> int:
        """How often the limit of storage has ended what ran in it."""
        return self._storage_hits

    @abstractmethod
    async def storage_used(self) -> int:
        """Bytes on the disk. SandboxError."""

    @property
    def _may_write(self) -> bool:
        return True

    @property
    def _is_lost(self) -> bool:
        """It is gone for good."""
        return False

    def watch(self) -> None:
        self._watcher = asyncio.ensure_future(self._watch_storage())

    async def _watch_storage(self) -> None:
        """Ends what runs when there is more on the disk than the limit."""
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
        async with self._killing:  # what is begun next is not ended with what went beyond the limit
            self._storage_allowed = await self.storage_used() + self.spec.limits.storage_mb * MIB

    async def _destroy(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])
        await super()._destroy()
