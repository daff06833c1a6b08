"""How many processes suit this machine."""

from __future__ import annotations

import os
from typing import Any

AUTO = "auto"
WORKERS_MAX = 1024


def available() -> int:
    """Cores that this process may use: taskset and cpusets count."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def auto_count(value: Any) -> Any:
    """`value`, or for `auto` as many as there are cores."""
    return min(available(), WORKERS_MAX) if value == AUTO else value
