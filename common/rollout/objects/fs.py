"""Objects as files: `cas/ab/cd/<hex>` with a `.meta.json` sibling, each made visible by one rename."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import sqlite3
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from blake3 import blake3

from rollout.files import fsync_dir
from rollout.model.errors import (
    ConfigError,
    NotFoundError,
    ObjectCorruptError,
    StateError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
)
from rollout.objects.digest import CHUNK, check_id, spool
from rollout.objects.fs_layout import CAS, found, path_of, paths_of
from rollout.objects.pins import PinTable
from rollout.objects.port import ObjectMeta

if TYPE_CHECKING:  # pydantic takes longer to import than a child process to start
    from rollout.config.cloud import CloudSection
    from rollout.config.settings import ObjectsSection, StorageSection

log = structlog.get_logger()

FREE_RESERVE = 64 << 20
"""Bytes of disk that a put leaves free; the ledger is usually on the same disk and must still be able to commit."""
_STALE_TMP_S = 24 * 3600
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def open_store(objects: ObjectsSection, storage: StorageSection, cloud: CloudSection) -> FsObjectStore:
    return FsObjectStore(Path(objects.path), shared=objects.shared)


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


@contextmanager
def storage_errors(what: str) -> Generator[None]:
    """Translate OSError to the typed error that a caller can act on."""
    try:
        yield
    except OSError as e:
        if e.errno in _FULL:
            raise StorageFullError(f"{what}: {e.strerror}; free space or enlarge the disk, then retry") from e
        raise StorageError(f"{what}: {e}") from e
    except sqlite3.OperationalError as e:
        if "full" in str(e):
            raise StorageFullError(f"{what}: {e}; free space or enlarge the disk, then retry") from e
        raise StorageError(f"{what}: {e}") from e


def make_directory(path: Path, key: str, mode: int = 0o777) -> None:
    """Create `path` and check that it is writable. Raises ConfigError, which names the setting `key`, and
    StorageFullError."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=mode)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as e:
        if e.errno in _FULL:
            raise StorageFullError(f"cannot write in {path}: {e.strerror}; free some space and start again") from e
        raise ConfigError(
            f"cannot write in {path}: {e.strerror or e}; check {key}, and the owner and mode of that directory"
        ) from e


def _begin_read(path: Path, offset: int, length: int) -> tuple[FileIO, int, bytes]:
    """Return the open file, its size and the first bytes, all in one thread call."""
    file = path.open("rb", buffering=0)
    try:
        size = os.fstat(file.fileno()).st_size
        file.seek(offset)
        return file, size, file.read(length)
    except BaseException:
        file.close()
        raise


class FsObjectStore:
    """Store in one directory. Processes of one host may share it; with `shared`, hosts may, over a network mount."""

    def __init__(
        self,
        root: Path,
        *,
        shared: bool = False,
        reserve_bytes: int = FREE_RESERVE,
        now_ms: Callable[[], int] = wall_ms,
    ) -> None:
        self._root = root
        self._shared = shared
        self._reserve = reserve_bytes
        self._now_ms = now_ms
        self._pins: PinTable | None = None

    async def open(self) -> None:
        await asyncio.to_thread(self._open)

    def _open(self) -> None:
        tmp = self._root / "tmp"
        make_directory(tmp, "[objects] path")
        with storage_errors(f"cannot use the object store {self._root}"):
            self._pins = PinTable(self._root / "pins.db", shared=self._shared, now_ms=self._now_ms)
            for left in tmp.iterdir():  # of uploads that a crash cut off
                if left.stat().st_mtime < time.time() - _STALE_TMP_S:
                    left.unlink(missing_ok=True)

    async def close(self) -> None:
        pins, self._pins = self._pins, None
        if pins is not None:
            await asyncio.to_thread(pins.close)

    def _table(self) -> PinTable:
        if self._pins is None:
            raise StateError("the object store is not open; await open() first")
        return self._pins

    def _is_there(self) -> bool:
        """Return False while the directory is moved away or its disk is not mounted."""
        return (self._root / "tmp").is_dir()

    def _away(self) -> StorageUnavailableError:
        return StorageUnavailableError(f"the object store {self._root} is not there: put it back, or mount its disk")

    def _absent(self, object_id: bytes) -> StorageUnavailableError | NotFoundError:
        """Return the error for an object without a file."""
        away = self._root / "corrupt" / object_id.hex()
        if away.exists():
            text = f"object {object_id.hex()} was damaged, and was moved to {away}; a new upload heals it"
            return NotFoundError(text)
        if not self._is_there() or self._path(object_id).exists():  # it may be back since the object was looked for
            return self._away()
        return NotFoundError(f"no object {object_id.hex()} in {self._root}")

    @contextmanager
    def _errors(self, what: str) -> Generator[None]:
        """Translate errors as `storage_errors` does; raise StorageUnavailableError if the store itself is missing."""
        try:
            with storage_errors(what):
                yield
        except ObjectCorruptError:
            raise
        except StorageError as e:
            cause = e.__cause__
            is_back = isinstance(cause, FileNotFoundError) and cause.filename == str(self._root)
            if self._is_there() and not is_back:
                raise
            raise self._away() from e

    def path_of(self, object_id: bytes) -> Path:
        """Return the path that an object is written to."""
        return path_of(self._root, check_id(object_id).hex())

    def _path(self, object_id: bytes) -> Path:
        """Return the path of an object that exists."""
        first, other = paths_of(self._root, check_id(object_id).hex())
        return other if not first.exists() and other.exists() else first

    # writing

    async def put(self, object_id: bytes, chunks: AsyncIterator[bytes], size: int) -> bool:
        path = self.path_of(object_id)
        tmp = self._root / "tmp" / uuid.uuid4().hex
        with self._errors(f"object {object_id.hex()[:12]} was not stored"):
            file: FileIO | None = None
            try:
                file = await asyncio.to_thread(self._begin, path, tmp, size)
                if file is None:
                    return False
                await spool(file, object_id, chunks, size)
                await asyncio.to_thread(self._publish, file, tmp, path, size)
            except BaseException:
                await asyncio.to_thread(tmp.unlink, missing_ok=True)
                raise
            finally:
                if file is not None:
                    file.close()  # last: a thread that is still at it finds no name to publish
        return True

    def _begin(self, path: Path, tmp: Path, size: int) -> FileIO | None:
        """Open a temporary file, or return None if the object exists."""
        if any(self._keep_existing(place, size) for place in paths_of(self._root, path.name)):
            return None
        self._check_room(size)
        return tmp.open("xb", buffering=0)

    def _keep_existing(self, path: Path, size: int) -> bool:
        try:
            if path.stat().st_size != size:  # damaged: the caller's bytes heal it
                return False
            os.utime(path)  # its grace before collection begins anew
        except FileNotFoundError:
            return False
        return True

    def _check_room(self, size: int) -> None:
        free = shutil.disk_usage(self._root).free
        if free < size + self._reserve:
            raise StorageFullError(
                f"the object store {self._root} has {free >> 20} MiB free; {size >> 20} MiB are needed and "
                f"{self._reserve >> 20} MiB are kept for the ledger: free space or enlarge the disk, then retry"
            )

    def _publish(self, file: FileIO, tmp: Path, path: Path, size: int) -> None:
        os.fsync(file.fileno())
        shard = path.parent
        if not shard.exists():
            shard.mkdir(parents=True, exist_ok=True)
            for directory in (self._root, self._root / CAS, shard.parent):
                fsync_dir(directory)
        meta = self._root / "tmp" / uuid.uuid4().hex
        try:
            with meta.open("x") as record:
                json.dump({"created_ms": self._now_ms(), "hash": "blake3", "size": size}, record)
                record.flush()
                os.fsync(record.fileno())
            meta.replace(self._meta_of(path))
        finally:
            meta.unlink(missing_ok=True)
        tmp.replace(path)  # last: a blob that can be seen has its meta beside it
        fsync_dir(shard)

    @staticmethod
    def _meta_of(path: Path) -> Path:
        return path.with_name(path.name + ".meta.json")

    # reading

    async def get(self, object_id: bytes, offset: int = 0, length: int | None = None) -> AsyncGenerator[bytes]:
        wanted = CHUNK if length is None else min(CHUNK, length)

        def begin() -> tuple[Path, FileIO, int, bytes]:
            path = self._path(object_id)
            return path, *_begin_read(path, offset, wanted)

        try:
            path, file, size, piece = await asyncio.to_thread(begin)
        except (FileNotFoundError, NotADirectoryError):
            raise self._absent(object_id) from None
        with file:
            end = size if length is None else min(size, offset + length)
            hasher = blake3() if offset == 0 and end == size else None
            at = offset
            while at < end:
                if at > offset:
                    piece = await asyncio.to_thread(file.read, min(CHUNK, end - at))
                if not piece:
                    break
                at += len(piece)
                if hasher is not None:
                    hasher.update(piece)
                    if at == end and hasher.digest() != object_id:  # before the last piece leaves
                        await asyncio.to_thread(self._quarantine, path, object_id)
                yield piece
            if hasher is not None and hasher.digest() != object_id:  # empty or cut short while it was read
                await asyncio.to_thread(self._quarantine, path, object_id)

    async def parts(self, object_id: bytes, parts: Sequence[tuple[int, int]]) -> list[bytes]:
        def read() -> list[bytes]:
            with self._path(object_id).open("rb", buffering=0) as file:
                return [os.pread(file.fileno(), length, offset) for offset, length in parts]

        with self._errors(f"object {object_id.hex()[:12]} was not read"):
            try:
                return await asyncio.to_thread(read)
            except FileNotFoundError:
                raise self._absent(object_id) from None

    def _quarantine(self, path: Path, object_id: bytes) -> None:
        """Move a damaged object away, so that the next upload of the true bytes heals the store."""
        away = self._root / "corrupt" / path.name
        away.parent.mkdir(exist_ok=True)
        path.replace(away)
        log.error("object_corrupt", object_id=object_id.hex(), moved_to=str(away))
        raise ObjectCorruptError(
            f"object {object_id.hex()} does not match its id; moved to {away}. Check the disk; a new upload heals it"
        )

    async def head(self, object_id: bytes) -> ObjectMeta | None:
        return await asyncio.to_thread(self._head, object_id)

    def _head(self, object_id: bytes) -> ObjectMeta | None:
        try:
            status = self._path(object_id).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return ObjectMeta(object_id, status.st_size, status.st_mtime_ns // 1_000_000)

    async def has(self, object_ids: list[bytes]) -> list[bool]:
        there = await asyncio.to_thread(lambda: [self._path(i).exists() for i in object_ids])
        if not all(there) and not self._is_there():
            raise self._away()
        return there

    async def list(self) -> AsyncGenerator[ObjectMeta]:
        for first in range(256):
            for meta in await asyncio.to_thread(self._list_shard, f"{first:02x}"):
                yield meta

    def _list_shard(self, first: str) -> list[ObjectMeta]:
        metas = [self._head(bytes.fromhex(name)) for name in found(self._root, first)]
        return [meta for meta in metas if meta is not None]

    # freeing

    async def delete(self, object_id: bytes) -> bool:
        """Delete the object. Returns False if it was absent or is pinned."""
        places = paths_of(self._root, check_id(object_id).hex())

        def remove() -> bool:
            removed = [self._remove(path) for path in places]
            return any(removed)

        with storage_errors(f"object {object_id.hex()[:12]} was not deleted"):
            return await asyncio.to_thread(self._table().unless_pinned, object_id, remove)

    def _remove(self, path: Path) -> bool:
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        self._meta_of(path).unlink(missing_ok=True)
        return True

    async def pin(self, object_ids: list[bytes], holder: str, ttl_s: float) -> None:
        with self._errors("objects were not pinned"):
            await asyncio.to_thread(self._table().pin, [check_id(i) for i in object_ids], holder, ttl_s)

    async def unpin(self, holder: str, object_ids: list[bytes] | None = None) -> None:
        with self._errors("objects were not unpinned"):
            await asyncio.to_thread(self._table().unpin, holder, object_ids)

    async def pinned(self, object_ids: list[bytes]) -> set[bytes]:
        return await asyncio.to_thread(self._table().pinned, object_ids)
