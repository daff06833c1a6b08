"""What every engine of peers.py does: get ready, then one run for each line on standard input. Standard library only.

A line is {"items": n, "sleep_ms": s}; the answer {"seconds": t}, from the first item submitted to the client knowing
that the last is done. Each engine has WORKERS worker processes with SLOTS items at once each.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable

WORKERS = 2
SLOTS = 16
SIZE = 256

Run = Callable[[int, int], Awaitable[None]]
"""(items, sleep_ms); returns when all are done."""


async def serve(run: Run, about: str) -> None:
    print(json.dumps({"about": about}), flush=True)
    while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
        asked = json.loads(line)
        began = time.perf_counter()
        await run(asked["items"], asked["sleep_ms"])
        print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)


def payload(n: int, sleep_ms: int) -> bytes:
    """`noop` or `wait`, the milliseconds and the item's number."""
    kind = b"wait" if sleep_ms else b"noop"
    return b"%s %d %d " % (kind, sleep_ms, n) + b"." * (SIZE - 32)


def sleep_of(data: bytes) -> float:
    return int(data.split(b" ", 2)[1]) / 1000
