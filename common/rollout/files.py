"""Files that are replaced whole, and locks that the kernel frees when their holder dies."""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rollout.model.errors import ConfigError


def fsync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def temporary_beside(path: Path) -> Path:
    """Return a fresh name in the directory of `path`, for a file that will be renamed to it."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")


@contextmanager
def replacing(
    path: Path, *, durable: bool = True, shared: bool = False, mode: int | None = None
) -> Generator[IO[bytes]]:
    """Replace `path` by what is written, with one rename; after an error the old file is unchanged. Raises OSError.

    `durable`: file and name are on disk afterwards. `shared`: several processes may replace it at once. `mode` applies
    from the first byte on, whatever the umask.
    """
    temporary = temporary_beside(path) if shared else path.with_name(f".{path.name}.tmp")
    created = 0o666 if mode is None else 0o600
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, created)
        with os.fdopen(fd, "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync_dir(path.parent)


def try_lock(file: int | IO[Any]) -> bool:
    """Lock an open file unless somebody else has it locked. Raises OSError if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(path: Path, mode: int = 0o666) -> Generator[None]:
    """Wait for the lock of `path`, which is made if necessary, and hold it inside the block. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


class FileLock:
    """An exclusive lock that its process holds until it releases it or dies.

    A child made by fork without exec would hold it too, and outlive its parent with it: start children by exec.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file: IO[bytes] | None = None

    @property
    def held(self) -> bool:
        return self._file is not None

    def try_acquire(self) -> bool:
        """Return False if another process (or another lock of this one) has it. Raises ConfigError if the file cannot
        be made."""
        if self._file is not None:
            return True
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.open("ab")
        except OSError as error:
            raise ConfigError(f"cannot make the lock file {self.path} ({error}): check its directory") from error
        try:
            taken = try_lock(file)
        except OSError as error:
            file.close()
            raise ConfigError(
                f"the file system of {self.path} has no file locks ({error}): use a local disk"
            ) from error
        if not taken:
            file.close()
            return False
        self._file = file
        return True

    def release(self) -> None:
        """Release the lock. The file stays: removing it would let two processes lock two different files of one
        name."""
        if self._file is not None:
            self._file.close()
            self._file = None
