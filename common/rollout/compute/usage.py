"""The load of this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil

from rollout.compute import cgroup

USAGE_S = 2.0


class Usage:
    """The load of this machine, (CPU in percent, memory in MiB), refreshed every `USAGE_S`."""

    def __init__(self, clock: Callable[[], float], root: Path = Path("/")) -> None:
        self._clock, self._root = clock, root
        self._seen = (0.0, 0)
        self._next = float("-inf")

    def __call__(self) -> tuple[float, int]:
        if (now := self._clock()) >= self._next:
            memory = psutil.virtual_memory()
            used = cgroup.memory_used(self._root)
            if used is None:
                used = memory.total - memory.available
            self._seen, self._next = (psutil.cpu_percent(), used >> 20), now + USAGE_S
        return self._seen
