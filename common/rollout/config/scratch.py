"""Temporary directories that a killed process leaves behind only until the next one of the same kind is made."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_NEW_S = 60.0
"""Whoever made one may not have locked it yet."""


class Scratch(tempfile.TemporaryDirectory[str]):
    """A temporary directory that is locked for as long as this process lives; those of the same `prefix` that nobody
    locks any more are removed first."""

    def __init__(self, prefix: str) -> None:
        for old in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            _remove_if_left(old)
        super().__init__(prefix=prefix, ignore_cleanup_errors=True)
        fd = os.open(self.name, os.O_RDONLY)
        # Not in the place of a standard stream that is closed.
        self._lock: int | None = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
        os.close(fd)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def cleanup(self) -> None:
        super().cleanup()
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def _remove_if_left(directory: Path) -> None:
    with suppress(OSError):  # somebody else's, or locked, or another process removes it as well
        found = directory.lstat()
        if found.st_uid != os.geteuid() or time.time() - found.st_mtime < _NEW_S:
            return
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory)
        finally:
            os.close(lock)
