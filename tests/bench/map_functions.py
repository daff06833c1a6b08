"""Functions of a millisecond."""

from __future__ import annotations

import time


def wait(row: int) -> int:
    """As one that asks another process or a disk."""
    time.sleep(0.001)
    return row


def work(row: int) -> int:
    """As one that computes: a millisecond of the processor's time, however many share it."""
    end = time.thread_time() + 0.001
    while time.thread_time() < end:
        pass
    return row
