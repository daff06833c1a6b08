"""What glibc's malloc keeps of memory that was freed."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
HEAPS = 2
KEPT = 16 << 20
"""Bytes that are free at the end of a heap before it gives them back."""
OWN_PAGES = 8 << 20
"""Smaller allocations come from a heap."""


def tune_malloc() -> None:
    """For processes that move messages of half a megabyte; before any thread starts.

    By default each thread has a heap for itself, up to eight a core, and each keeps what messages have once taken. What
    is kept is about as large as one message, so that most of them begin with a page fault for each 4 KiB. Two heaps
    that keep 16 MiB take less memory and less time. Whoever set a variable of malloc's knows better. Without effect
    where there is another libc.
    """
    if any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ):
        return
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_ARENA_MAX, HEAPS)
        mallopt(_M_TRIM_THRESHOLD, KEPT)
        mallopt(_M_MMAP_THRESHOLD, OWN_PAGES)
