"""Work that runs to its end even if its task is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

import structlog

from rollout.model.errors import RolloutError

T = TypeVar("T")
log = structlog.get_logger()


async def to_the_end(work: Awaitable[T]) -> T:
    """Run `work` to its end however often this task is cancelled; then raise its error, or CancelledError."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    result = task.result()
    if cancelled:
        raise asyncio.CancelledError
    return result


async def shielded(work: Awaitable[None], deadline_s: float) -> None:
    """Run `work` to its end even if this task is cancelled again, for at most `deadline_s` seconds."""
    task = asyncio.ensure_future(asyncio.wait_for(work, deadline_s))
    while not task.done():
        with suppress(asyncio.CancelledError, TimeoutError):
            await asyncio.shield(task)
    if not task.cancelled() and isinstance(task.exception(), TimeoutError):
        log.warning("cloud_abort_late", deadline_s=deadline_s)


async def uninterrupted(work: Awaitable[None], deadline_s: float) -> None:
    """Run `work`. If this task is cancelled, wait for it for at most `deadline_s` seconds."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        with suppress(RolloutError):
            await shielded(task, deadline_s)
        raise
