"""Caches installations of coding CLIs on the worker's host, because set-up is slow and fails most often.

There is one .tar for each kind of sandbox, program and version. Trials that need the same one wait for the first of
them; if that fails, they all install by themselves, concurrently.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from time import time

import structlog

log = structlog.get_logger()

KEPT = 16
"""Number of most recently used files to keep."""


def default_cache() -> InstallCache:
    """Return the cache in the user's cache directory, `$XDG_CACHE_HOME`."""
    return InstallCache(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollout" / "agents")


class InstallCache:
    _being_made: dict[Path, asyncio.Event] = {}  # of this process: trials run side by side in one

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def get_or_make(self, key: str, make: Callable[[Path], Awaitable[bool]]) -> Path | None:
        """Return the file of `key`, or None if `make` was called, which has then done its work, whether or not it left
        a file. `make` writes to the path that it is given, and returns whether it did. What it raises is raised."""
        path = self._directory / f"{key}.tar"
        mine: asyncio.Event | None = None
        if (other := self._being_made.get(path)) is not None:
            await other.wait()
        else:
            mine = self._being_made[path] = asyncio.Event()  # before anything is awaited: others are to find it
        try:
            if await asyncio.to_thread(self._used, path):
                return path
            scratch = await asyncio.to_thread(self._scratch)
            try:
                if await make(scratch / "tar"):
                    await asyncio.to_thread(self._keep, scratch / "tar", path)
            finally:
                await asyncio.to_thread(_remove, scratch)
        finally:
            if mine is not None:
                del self._being_made[path]
                mine.set()
        return None

    async def drop(self, key: str) -> None:
        """Remove an entry that does not work."""
        await asyncio.to_thread((self._directory / f"{key}.tar").unlink, True)

    def _used(self, path: Path) -> bool:
        try:
            os.utime(path)
        except OSError:
            return False
        return True

    def _scratch(self) -> Path:
        self._directory.mkdir(parents=True, exist_ok=True)
        return Path(mkdtemp(dir=self._directory, prefix="."))

    def _keep(self, made: Path, path: Path) -> None:
        made.replace(path)
        others = sorted(self._directory.glob("*.tar"), key=_age)
        for old in others[KEPT:]:
            old.unlink(missing_ok=True)
        log.info("agent_installation_kept", path=str(path), bytes=path.stat().st_size)


def _age(path: Path) -> float:
    try:
        return time() - path.stat().st_mtime
    except OSError:
        return float("inf")


def _remove(directory: Path) -> None:
    for file in directory.iterdir():
        file.unlink(missing_ok=True)
    with suppress(OSError):
        directory.rmdir()
