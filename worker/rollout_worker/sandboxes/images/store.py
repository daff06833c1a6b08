"""Images made here, each in a directory named after its content, and shared by the processes of this host.

STATE/images/KEY/          the image and image.json
STATE/images/KEY.lock      held by the process that makes it
STATE/images/.making-KEY   not yet complete
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog
from pydantic import TypeAdapter
from rollout.files import try_lock

from rollout_worker.sandboxes import trees
from rollout_worker.sandboxes.errors import ImageError

log = structlog.get_logger()

KEEP_BYTES = 50 << 30
KEEP_S = 48 * 3600.0
"""Time for which a requested image is not removed: a trial may still run on it."""
_RECORD = "image.json"
_BEGUN = time.time()
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Made:
    """An image's directory, and its configuration. `size` is in bytes, set once it is stored."""

    path: Path = field(default_factory=Path)
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    workdir: str | None = None
    user: str | None = None
    entrypoint: tuple[str, ...] = ()
    size: int = 0


_RECORDS = TypeAdapter(Made)


Pause = Callable[[str], AbstractContextManager[None]]
"""Context entered, with a description, while nothing goes on but waiting for others."""


def no_pause(what: str) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


Make = Callable[[Path], Awaitable[Made]]
"""Function that fills an empty directory; the `path` of its result is ignored."""


class Store:
    """A store that survives a crash: what is incomplete has another name."""

    def __init__(self, state: Path, *, keep_bytes: int = KEEP_BYTES, keep_s: float = KEEP_S) -> None:
        self.directory = state.absolute() / "images"
        self._keep_bytes = keep_bytes
        self._keep_s = keep_s

    def find(self, key: str) -> Made | None:
        """Return the image with this key, which is then kept for a while, or None."""
        path = self.directory / key
        try:
            made = _RECORDS.validate_json((path / _RECORD).read_bytes())
            os.utime(path / _RECORD)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return replace(made, path=path)

    async def get(self, key: str, make: Make, *, anew: bool = False, pause: Pause = no_pause) -> Made:
        """Return the image with this key, or what `make` makes; one process makes it, others wait for that.

        `pause` is entered while another one makes it. `anew` makes it again, unless it was made since this process
        began. Raises ImageError if the disk has no room, and what `make` raises.
        """
        if not anew and (found := await asyncio.to_thread(self.find, key)) is not None:
            return found
        try:
            await asyncio.to_thread(self.directory.mkdir, 0o700, True, True)
            async with self._alone(key, pause):
                found = await asyncio.to_thread(self.find, key)
                if found is not None and (not anew or self._is_of_this_run(key)):
                    return found
                return await self._make(key, make)
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            remedy = "make room there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "the worker must write there"
            message = f"the image cannot be kept in {self.directory}: {error.strerror or error}{where}; {remedy}"
            raise ImageError(message) from error

    def _is_of_this_run(self, key: str) -> bool:
        return (self.directory / key).stat().st_ctime > _BEGUN

    async def _make(self, key: str, make: Make) -> Made:
        making = self.directory / f".making-{key}"
        try:
            await asyncio.to_thread(trees.remove, str(making))
            making.mkdir(mode=0o755)
            made = await make(making)
            await asyncio.to_thread(self._finish, key, making, made)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(_remove_quietly, making))
            raise
        found = self.find(key)
        assert found is not None
        with contextlib.suppress(OSError):  # this makes room for later images; this one is stored
            await asyncio.to_thread(self.prune)
        return found

    def _finish(self, key: str, making: Path, made: Made) -> None:
        (making / _RECORD).write_bytes(_RECORDS.dump_json(replace(made, size=trees.usage(str(making)))))
        target = self.directory / key
        if target.exists():  # made again: running sandboxes still use the old one
            old = self.directory / f".old-{key}-{time.time_ns()}"
            target.rename(old)
        making.rename(target)

    @contextlib.asynccontextmanager
    async def _alone(self, key: str, pause: Pause) -> AsyncGenerator[None]:
        fd = os.open(self.directory / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not try_lock(fd):
                with pause("waiting for its image, which another trial makes"):
                    while not try_lock(fd):  # noqa: ASYNC110 - of another process
                        await asyncio.sleep(_LOOK_S)
            yield
        finally:
            os.close(fd)

    def prune(self) -> None:
        """Remove what was not requested recently, the longest unused first, until the rest is small enough."""
        now = time.time()
        entries: list[tuple[float, int, Path]] = []
        for path in self.directory.iterdir():
            if path.name.startswith((".old-", ".gone-")):
                if now - path.stat().st_ctime > self._keep_s or path.name.startswith(".gone-"):
                    _remove_quietly(path)
            elif path.is_dir() and not path.name.startswith("."):
                size = _RECORDS.validate_json((path / _RECORD).read_bytes()).size
                entries.append(((path / _RECORD).stat().st_mtime, size, path))
        total = sum(size for _, size, _ in entries)
        for used, size, path in sorted(entries):
            if total <= self._keep_bytes:
                return
            if now - used > self._keep_s:
                log.info("image_pruned", image=path.name, size_mb=size >> 20)
                gone = path.with_name(f".gone-{path.name}-{time.time_ns()}")
                path.rename(gone)
                _remove_quietly(gone)
                total -= size


def _remove_quietly(path: Path) -> None:
    try:
        trees.remove(str(path))
    except OSError as error:
        log.warning("image_not_removed", path=str(path), error=str(error))
