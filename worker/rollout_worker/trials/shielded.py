"""Cleaning up that is done before a cancelled task ends, however often it is cancelled meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable


async def to_the_end(work: Awaitable[None]) -> None:
    """Wait for `work`; then what it raised, or CancelledError where this task was cancelled."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError
