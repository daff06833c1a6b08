"""From `ab/cd/<hex>` to `cas/ab/cd/<hex>`, which is the layout in buckets too."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

CAS = "cas"
_SHARD = "[0-9a-f][0-9a-f]"


def move_old_layout(root: Path) -> None:
    """Renames only, so it costs nothing and may be cut off anywhere: what is not moved yet is moved at the next open.
    Whoever opens the store meanwhile waits for it. Blocking; OSError."""
    if not any(root.glob(_SHARD)):
        return
    with (root / ".layout.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (root / CAS).mkdir(exist_ok=True)
        for shard in sorted(root.glob(_SHARD)):
            _merge(shard, root / CAS / shard.name)
        for directory in (root / CAS, root):
            _fsync(directory)


def _merge(source: Path, target: Path) -> None:
    """Into what is there already where an earlier move was cut off, or objects were stored since."""
    if not source.is_dir():
        # equal names are equal bytes; the one in the new place is the one that was read and written since
        if target.exists():
            source.unlink()
        else:
            source.rename(target)
        return
    if not target.exists():
        source.rename(target)
        return
    # "<hex>.meta.json" before "<hex>": an object that can be seen has its meta beside it
    for entry in sorted(source.iterdir(), reverse=True):
        _merge(entry, target / entry.name)
    _fsync(target)
    source.rmdir()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
