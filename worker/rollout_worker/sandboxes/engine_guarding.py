"""The owner's end of its guard over containers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import Self

import rollout_worker

# Without site: it is small, and most of the time it only waits.
_PROGRAM = """
import sys
sys.path.append(sys.argv.pop(1))
from rollout_worker.sandboxes.engine_guard import main
main()
"""
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
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", _PROGRAM, str(Path(rollout_worker.__file__).parents[1])),
                *(str(reader), url, label),
                pass_fds=[reader],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                env={"PATH": os.defpath},
                cwd="/",
                start_new_session=True,
            )
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
