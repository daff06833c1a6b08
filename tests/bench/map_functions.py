"""Functions of a millisecond."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path


def wait(row: int) -> int:
    """As one that asks another process or a disk."""
    time.sleep(0.001)
    return row


async def later(row: int) -> int:
    """As one that waits 20 ms for a server."""
    await asyncio.sleep(0.02)
    return row


def work(row: int) -> int:
    """As one that computes: a millisecond of the processor's time, however many share it."""
    end = time.thread_time() + 0.001
    while time.thread_time() < end:
        pass
    return row


LINES, LINE = 100_000, "x" * 99  # 10 MB a row


def shout(row: int) -> int:
    """Prints 10 MB."""
    for _ in range(LINES):
        print(LINE)
    return row


def hush(row: int) -> int:
    """Prints ten times as much to nowhere, which takes about as long."""
    with Path("/dev/null").open("w") as nowhere:
        for _ in range(10 * LINES):
            print(LINE, file=nowhere)
    return row
