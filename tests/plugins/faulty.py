"""A python plugin with every fault, for the tests."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from typing import Any

if os.environ.get("TEST_PLUGIN_REFUSES"):
    raise RuntimeError("refuses to start")

COUNT = [0]


def count() -> int:
    COUNT[0] += 1
    return COUNT[0]


def pid() -> int:
    return os.getpid()


async def hang() -> None:
    await asyncio.Event().wait()


def spin() -> None:
    while True:
        time.sleep(0.01)


def crash() -> None:
    sys.stderr.write("about to crash\n")
    sys.stderr.flush()
    ctypes.string_at(0)


def leave() -> None:
    os._exit(3)


def big(size: int) -> str:
    return "x" * size


def chatter(lines: int) -> str:
    for i in range(lines):
        print("line", i)
    return "done"


def raises() -> None:
    raise KeyError("nothing here")


def not_json() -> Any:
    return {1, 2}


def nan() -> float:
    return float("nan")


def back(value: bytes) -> bytes:
    return value[::-1]


async def rest(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


def secret() -> str | None:
    return os.environ.get("ROLLOUT_SECRET_TOKEN")


def child() -> int:
    """A grandchild that would outlive a careless host."""
    import subprocess

    return subprocess.Popen(["sleep", "1000"]).pid
