"""Diagnoses the disk under a file, with the remedy.

SQLite reports `disk I/O error` for most faults without the system's error, so a small write next to the file finds it.
"""

from __future__ import annotations

import errno
import os
import resource
import tempfile
from pathlib import Path

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE})

_REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or raise the quota of this user",
    errno.EROFS: "the file system is mounted read-only, as the kernel does after a fault of the disk: see dmesg, then "
    "mount it for writing",
    errno.EACCES: "check owner and mode of the file and its directory",
    errno.EPERM: "check owner, mode and attributes of the file and its directory",
    errno.EFBIG: "files of this process may not become that large: raise the limit (`ulimit -f`)",
    errno.EIO: "the disk or its connection fails: see dmesg, and have a backup ready",
    errno.ENOENT: "its directory is gone: was the file system unmounted?",
    errno.ESTALE: "the network file system lost the file: mount it anew",
    errno.EMFILE: "this process may open no more files: raise the limit (`ulimit -n`)",
    errno.ENFILE: "this machine may open no more files: see fs.file-max",
}
_ANY = "see the kernel's log (dmesg) and the disk's state"


def fault_of(path: Path) -> OSError | None:
    """Return the error of a write next to `path`, or None if it works."""
    try:
        reach = 0
        if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
            # As far into a file as `path` and its log reach: that is what the limit is about.
            reach = max(_size(path), _size(path.with_name(f"{path.name}-wal")))
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            os.pwrite(descriptor, b"\0" * 4096, reach)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            Path(name).unlink()
        with path.open("r+b"):
            return None
    except OSError as error:
        return error


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def in_words(error: OSError | None, said: str) -> str:
    """Return `Read-only file system (...): what to do`; `said` is the database's message."""
    if error is None or error.errno is None:
        return f"{said}: {_ANY}"
    return f"{os.strerror(error.errno)} ({said}): {_REMEDIES.get(error.errno, _ANY)}"
