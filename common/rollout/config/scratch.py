"""Temporary directories that survive a killed process only until the next one of the same kind is made."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from rollout.files import try_lock

_NEW_S = 60.0
"""Seconds during which a new directory may not be locked yet."""


class Scratch(tempfile.TemporaryDirectory[str]):
    """Temporary directory that this process locks while it lives. Unlocked ones of the same `prefix` are removed
    first."""

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
            if try_lock(lock):
                shutil.rmtree(directory)
        finally:
            os.close(lock)
