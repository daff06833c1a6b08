"""What is done to its end, whoever cancels."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress

import structlog

from rollout.model.errors import RolloutError

log = structlog.get_logger()


async def shielded(work: Awaitable[None], deadline_s: float) -> None:
    """To its end, though the task that waits is cancelled again meanwhile; not longer than `deadline_s`."""
    task = asyncio.ensure_future(asyncio.wait_for(work, deadline_s))
    while not task.done():
        with suppress(asyncio.CancelledError, TimeoutError):
            await asyncio.shield(task)
    if not task.cancelled() and isinstance(task.exception(), TimeoutError):
        log.warning("cloud_abort_late", deadline_s=deadline_s)


async def uninterrupted(work: Awaitable[None], deadline_s: float) -> None:
    """As `work` ends. Cancelled meanwhile, it is waited for no longer than `deadline_s`."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        with suppress(RolloutError):
            await shielded(task, deadline_s)
        raise
