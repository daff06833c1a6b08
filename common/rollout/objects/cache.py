"""Objects that a host has fetched, shared by its processes; the least recently used are evicted first."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from rollout.files import try_lock
from rollout.model.errors import ObjectCorruptError
from rollout.model.item import Blob, ObjectSlice
from rollout.objects.digest import check_id
from rollout.objects.fs import storage_errors

_IN_USE_S = 60.0
"""Seconds after its last use in which an object is not evicted, because its path may just have been returned."""
_SCAN_EVERY = 64
_LOOK_S = 0.05
"""Maximum seconds between two attempts at a lock that somebody else holds."""


class ObjectCache:
    """Cache whose `path` and `read` fetch a missing object once per host, however many tasks and processes ask.

    `fetch(object_id, path)` must put the verified bytes at `path`, as `RemoteObjects.fetch` does. `max_bytes` is an
    approximate limit: objects in use stay. Raises StorageError if the directory cannot be read or written.
    """

    def __init__(
        self,
        directory: Path,
        max_bytes: int,
        fetch: Callable[[bytes, Path], Awaitable[None]],
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._directory = directory
        self._unreadable = f"the object cache {directory} cannot be read"
        self._max_bytes = max_bytes
        self._fetch = fetch
        self._now = now
        self._running: dict[bytes, asyncio.Task[Path]] = {}
        self._size: int | None = None
        self._inserts = 0

    async def path(self, object_id: bytes) -> Path:
        """Return a read-only file with the object's bytes. Open it or link to it at once: eviction may remove the
        name."""
        path = self._path_of(object_id)
        with storage_errors(self._unreadable):
            if await asyncio.to_thread(self._touch, path):
                return path
        task = self._running.get(object_id)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._load(object_id, path))
            self._running[object_id] = task
            task.add_done_callback(lambda done: self._ended(object_id, done))
        return await asyncio.shield(task)

    async def has(self, object_id: bytes) -> bool:
        """Return whether the object is cached; it then stays for a while."""
        with storage_errors(self._unreadable):
            return await asyncio.to_thread(self._touch, self._path_of(object_id))

    async def ready(self, object_id: bytes, end: int) -> None:
        """Fetch the object if it is not cached. Raises ObjectCorruptError if it is shorter than `end` bytes."""
        path = await self.path(object_id)
        with storage_errors(self._unreadable), suppress(FileNotFoundError):  # evicted meanwhile: its reader asks again
            if (await asyncio.to_thread(path.stat)).st_size < end:
                raise ObjectCorruptError(f"object {object_id.hex()} is shorter than the slice that refers to it")

    async def read(self, blob: Blob) -> bytes:
        """Return the bytes of a blob. The object of a slice is fetched whole."""
        if isinstance(blob, bytes):
            return blob
        for _ in range(4):
            await self.ready(blob.object_id, blob.offset + blob.length)
            with storage_errors(self._unreadable):
                (found,) = await asyncio.to_thread(read_cached, self._directory, [blob])
            if isinstance(found, bytes):
                return found
        raise ObjectCorruptError(f"the cache {self._directory} is too small: objects are evicted before they are read")

    async def close(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _ended(self, object_id: bytes, task: asyncio.Task[Path]) -> None:
        self._running.pop(object_id, None)
        if not task.cancelled():
            task.exception()  # seen, even if every waiter has gone

    def _path_of(self, object_id: bytes) -> Path:
        return _path_in(self._directory, object_id)

    def _touch(self, path: Path) -> bool:
        try:
            os.utime(path, (self._now(), self._now()))
        except FileNotFoundError:
            return False
        return True

    async def _load(self, object_id: bytes, path: Path) -> Path:
        with storage_errors(f"the object cache {self._directory} cannot be written"):
            await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
            async with locked(self._directory / "locks" / path.name):
                if not await asyncio.to_thread(self._touch, path):  # another process may have been faster
                    incoming = path.with_name(path.name + ".incoming")
                    await self._fetch(object_id, incoming)
                    size = await asyncio.to_thread(self._publish, incoming, path)
                    await self._account(size)
        return path

    def _publish(self, incoming: Path, path: Path) -> int:
        incoming.chmod(0o444)  # hard links share it: nobody may write through one
        os.utime(incoming, (self._now(), self._now()))
        incoming.replace(path)
        return path.stat().st_size

    async def _account(self, size: int) -> None:
        self._inserts += 1
        if self._size is not None:
            self._size += size
        if self._size is None or self._size > self._max_bytes or self._inserts % _SCAN_EVERY == 0:
            async with locked(self._directory / "locks" / "evict"):
                self._size = await asyncio.to_thread(self._evict)

    def _evict(self) -> int:
        """Remove the oldest objects until 90 % of the limit remain. Returns the bytes that remain."""
        files: list[tuple[float, int, Path]] = []
        for path in self._directory.glob("??/*"):
            try:
                found = path.stat()
            except FileNotFoundError:
                continue
            files.append((found.st_mtime, found.st_size, path))
        total = sum(size for _, size, _ in files)
        if total <= self._max_bytes:
            return total
        protected = self._now() - _IN_USE_S
        for used, size, path in sorted(files):
            if used > protected or total <= self._max_bytes * 0.9:
                break
            path.unlink(missing_ok=True)
            (self._directory / "locks" / path.name).unlink(missing_ok=True)
            total -= size
        return total


def _path_in(directory: Path, object_id: bytes) -> Path:
    name = check_id(object_id).hex()
    return directory / name[:2] / name


def read_cached(directory: Path, blobs: Sequence[Blob]) -> list[Blob]:
    """Return the blobs, with the bytes of each slice whose object is in the cache `directory`. Blocking.

    Raises OSError if a cached object cannot be read.
    """
    found = list(blobs)
    by_object: dict[bytes, list[tuple[int, ObjectSlice]]] = {}
    for index, blob in enumerate(blobs):
        if isinstance(blob, ObjectSlice):
            by_object.setdefault(blob.object_id, []).append((index, blob))
    for object_id, slices in by_object.items():
        try:
            with _path_in(directory, object_id).open("rb", buffering=0) as file:
                for index, blob in slices:
                    data = os.pread(file.fileno(), blob.length, blob.offset)
                    if len(data) == blob.length:
                        found[index] = data
        except FileNotFoundError:  # not here yet, or evicted by another process
            continue
    return found


@asynccontextmanager
async def locked(path: Path) -> AsyncGenerator[None]:
    """Hold a lock among the host's processes and this process's tasks; the kernel releases a dead process's lock.

    A waiter polls, because threads blocked on the lock could be the ones that its holder needs.
    """

    def acquire() -> BinaryIO | None:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
        try:
            if try_lock(file) and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                return file
        except FileNotFoundError:  # removed by an eviction between open and lock
            pass
        except BaseException:
            file.close()
            raise
        file.close()
        return None

    wait_s = 0.001
    while (file := await _whole(acquire)) is None:
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, _LOOK_S)
    try:
        yield
    finally:
        file.close()


async def _whole(acquire: Callable[[], BinaryIO | None]) -> BinaryIO | None:
    """Run `acquire` uncancelled: a lock taken by a thread that nobody waits for would be held forever."""
    pending = asyncio.ensure_future(asyncio.to_thread(acquire))
    try:
        return await asyncio.shield(pending)
    except asyncio.CancelledError:
        pending.add_done_callback(_release)
        raise


def _release(done: asyncio.Task[BinaryIO | None]) -> None:
    if not done.cancelled() and done.exception() is None and (file := done.result()) is not None:
        file.close()
