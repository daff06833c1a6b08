"""Number of processes that suits this machine."""

from __future__ import annotations

import os
from typing import Any

AUTO = "auto"
WORKERS_MAX = 1024


def available() -> int:
    """Return the number of cores that this process may use; taskset and cpusets count."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def auto_count(value: Any) -> Any:
    """Return `value`, or for `auto` the number of cores."""
    return min(available(), WORKERS_MAX) if value == AUTO else value
