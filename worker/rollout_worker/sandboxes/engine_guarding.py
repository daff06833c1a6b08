"""The owner's end of its guard over containers."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Self

from rollout_worker.sandboxes.programs import start_program

_SCHEMES = ("unix://", "tcp://", "http://")


class EngineGuard:
    """The process `engine_guard.py`, for as long as this process lives."""

    def __init__(self, process: asyncio.subprocess.Process, end: int) -> None:
        self._process = process
        self._end = end

    @classmethod
    async def start(cls, url: str, label: str) -> Self | None:
        """None: it does not know how to reach such an engine."""
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
        """`cleared`: there is nothing to remove; else it goes on to remove it."""
        if cleared:
            with contextlib.suppress(OSError):
                os.write(self._end, b"x")
        os.close(self._end)
        if cleared:
            await self._process.wait()
