"""The owner's end of its container guard."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Self

from rollout_worker.sandboxes.programs import start_program

_SCHEMES = ("unix://", "tcp://", "http://")


class EngineGuard:
    """The process `engine_guard.py`, which runs as long as this process lives."""

    def __init__(self, process: asyncio.subprocess.Process, end: int) -> None:
        self._process = process
        self._end = end

    @classmethod
    async def start(cls, url: str, label: str) -> Self | None:
        """Start the guard. Returns None if it cannot reach engines at such a URL."""
        if not url.startswith(_SCHEMES) or (url.startswith("tcp://") and "DOCKER_TLS_VERIFY" in os.environ):
            return None
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            process = await start_program("engine_guard", "main", reader, url, label)
        except BaseException:
            os.close(writer)
            raise
        finally:
            os.close(reader)
        return cls(process, writer)

    async def stop(self, *, cleared: bool) -> None:
        """Stop the guard. If `cleared`, there is nothing to remove; otherwise it removes the containers."""
        if cleared:
            with contextlib.suppress(OSError):
                os.write(self._end, b"x")
        os.close(self._end)
        if cleared:
            await self._process.wait()
