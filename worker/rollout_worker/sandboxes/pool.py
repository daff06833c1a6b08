"""Sandboxes made before they are needed."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

import structlog

from rollout_worker.sandboxes.errors import SandboxError, SandboxNoRoomError
from rollout_worker.sandboxes.port import Provider, Sandbox, Spec

log = structlog.get_logger()

_NO_ROOM_S, _FAULT_S = 0.2, 5.0


class WarmPool:
    """Keeps up to `size` sandboxes of one spec ready; whoever takes one owns it, and destroys it.

    Warm sandboxes count towards what the host admits, like any other, but never wait for room before somebody who
    needs one. `shrink` gives theirs back; the pool fills up again after the next `take`.
    """

    def __init__(self, provider: Provider, spec: Spec, size: int) -> None:
        self._provider = provider
        self._spec = spec
        self._size = size
        self._warm: list[Sandbox] = []
        self._wanted = asyncio.Event()
        self._filler: asyncio.Task[None] | None = None

    @property
    def ready(self) -> int:
        return len(self._warm)

    async def __aenter__(self) -> Self:
        """SandboxRefusedError, at once, for a spec that the provider refuses."""
        if self._size > 0:
            self._warm.append(await self._provider.create(self._spec))
            self._wanted.set()
            self._filler = asyncio.ensure_future(self._fill())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._filler is not None:
            self._filler.cancel()
            await asyncio.wait([self._filler])
        await self.shrink()

    async def take(self) -> Sandbox:
        """A warm one that still lives, or else a new one."""
        while self._warm:
            sandbox = self._warm.pop(0)
            self._wanted.set()
            if await _lives(sandbox):
                return sandbox
        return await self._provider.create(self._spec)

    async def shrink(self) -> None:
        """Destroy all that are warm."""
        warm, self._warm = self._warm, []
        await asyncio.gather(*(sandbox.destroy() for sandbox in warm))

    async def _fill(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while len(self._warm) < self._size:
                try:
                    self._warm.append(await self._provider.create(self._spec, wait=False))
                except SandboxNoRoomError:
                    await asyncio.sleep(_NO_ROOM_S)
                except SandboxError as error:  # whoever takes one is told; a warm one is only a convenience
                    log.warning("sandbox_not_warmed", error=error.message)
                    await asyncio.sleep(_FAULT_S)


async def _lives(sandbox: Sandbox) -> bool:
    """It may have been lost while it waited."""
    try:
        await sandbox.kill()
    except SandboxError:
        await sandbox.destroy()
        return False
    return True
