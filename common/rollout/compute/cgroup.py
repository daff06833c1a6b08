"""The limits of a container: cgroups, versions 1 and 2. It reads a few small files, which blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

_UNLIMITED_V1 = 1 << 60  # the kernel's "no limit" is the largest page-aligned signed 64-bit number


def cpu_limit(root: Path = Path("/")) -> float | None:
    """Return the tightest CPU quota of this process's group and its parents, or None without a limit."""
    return min(_cpus(root), default=None)


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the tightest memory limit in bytes of this process's group and its parents, or None without a limit."""
    return min(_memory(root), default=None)


def memory_used(root: Path = Path("/")) -> int | None:
    """Return the bytes in use under the tightest limit, without reclaimable file pages, or None without a limit."""
    limit = memory_limit(root)
    for directory in _groups(root, "memory"):
        for limited, used, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            current = _number(directory / used)
            if limit is not None and current is not None and _number(directory / limited) == limit:
                words = (line.split() for line in _lines(directory / "memory.stat"))
                return max(0, current - next((int(n) for name, n in words if name == cached), 0))
    return None


def oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes of this process's own group the kernel killed for lack of memory; 0 if not counted."""
    for directory in _groups(root, "memory"):
        for name in ("memory.events", "memory.oom_control"):
            for line in _lines(directory / name):
                word, _, count = line.partition(" ")
                if word == "oom_kill" and count.isdigit():
                    return int(count)
    return 0


def _cpus(root: Path) -> Iterator[float]:
    for directory in _groups(root, "cpu"):
        words = _words(directory / "cpu.max")  # version 2: "max 100000" or "150000 100000"
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
            yield int(words[0]) / int(words[1])
        quota, period = _number(directory / "cpu.cfs_quota_us"), _number(directory / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            yield quota / period


def _memory(root: Path) -> Iterator[int]:
    for directory in _groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _number(directory / name)
            if limit is not None and 0 < limit < _UNLIMITED_V1:
                yield limit


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield directories of this process's group and its parents. In a container its own is usually mounted at the
    top."""
    mount = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            bases = [mount, mount / "unified"]
        elif controller in controllers.split(","):
            bases = [mount / controllers, mount / controller]
        else:
            continue
        for base in bases:
            place = base / path.strip("/")
            yield from [place, *(p for p in place.parents if p.is_relative_to(base))]


def whole_cpus(limit: float | None, count: int) -> int:
    """Return `count` reduced to a quota, at least 1; a fraction counts as one."""
    return count if limit is None else max(1, min(count, math.ceil(limit)))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    lines = _lines(path)
    return lines[0].split() if lines else []


def _number(path: Path) -> int | None:
    words = _words(path)
    try:
        return int(words[0]) if words else None
    except ValueError:  # "max"
        return None
