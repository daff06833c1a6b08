"""Disk usage of processes that no directory shows: files removed while they are open or mapped.

Standard library only. Files in transit between processes, in a socket, are not found.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator

_IN_MEMORY = ("tmpfs", "devtmpfs", "ramfs", "mqueue", "hugetlbfs")
_MAPPED = re.compile(rb"^([0-9a-f]+-[0-9a-f]+) .* \(deleted\)$", re.MULTILINE)


def unlinked_size(pids: Iterable[int]) -> int:
    """Return the bytes on disk of removed files. Files that cannot be inspected count as 0."""
    sizes = dict[tuple[int, int], int]()
    in_memory = None
    for pid in pids:
        in_memory = in_memory or _devices_in_memory(pid)
        for status in _removed(pid):
            if status.st_dev not in in_memory:
                sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


def _removed(pid: int) -> Iterator[os.stat_result]:
    for task in _names(f"/proc/{pid}/task"):  # a thread may have descriptors of its own (unshare(2), CLONE_FILES)
        for number in _names(f"/proc/{pid}/task/{task}/fd"):
            with contextlib.suppress(OSError):
                status = os.stat(f"/proc/{pid}/task/{task}/fd/{number}")
                if status.st_nlink == 0 and stat.S_ISREG(status.st_mode):
                    yield status
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
        for addresses in _MAPPED.findall(file.read()):
            with contextlib.suppress(OSError):  # only root of the machine may
                yield os.stat(f"/proc/{pid}/map_files/{addresses.decode()}")


def _names(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:  # it ended
        return []


def _devices_in_memory(pid: int) -> set[int]:
    """Return devices whose files count as memory: those of the process's mounts, and that of memfd_create(2)."""
    unnamed = os.memfd_create("look", os.MFD_CLOEXEC)
    found = {os.fstat(unnamed).st_dev}
    os.close(unnamed)
    with contextlib.suppress(OSError), open(f"/proc/{pid}/mountinfo", "rb") as file:
        for line in file:
            fields, _, rest = line.partition(b" - ")
            if rest.split(b" ", 1)[0].decode() in _IN_MEMORY:
                major, _, minor = fields.split(b" ")[2].partition(b":")
                found.add(os.makedev(int(major), int(minor)))
    return found
