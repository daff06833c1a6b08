"""Limits that DuckDB cannot enforce: it neither interrupts nor limits a function over a single value."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress

import psutil

MEMORY = 4 << 30
"""Bytes that a query may use in addition to the process's own."""


@contextmanager
def limited_memory() -> Generator[None]:
    """Limit memory inside the block, where the system supports it, so that a huge value ends the query and not the
    machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = psutil.Process().memory_info().vms + MEMORY
    if soft != resource.RLIM_INFINITY:
        wanted = min(wanted, soft)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    try:
        yield
    finally:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def give_up() -> None:
    """End the process, because its query does not stop."""
    sys.stderr.write("error: the query was stopped: it took longer than its time limit\n")
    sys.stderr.flush()
    os._exit(2)
