"""Batches of a queue service's calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

IN_FLIGHT = 16
"""Calls at a time."""


def cut(items: Sequence[T], count: int, size: Callable[[T], int] | None = None, max_size: int = 0) -> list[list[T]]:
    """In order, into lists of at most `count`, and of at most `max_size` by `size` but for an item that is alone."""
    lists: list[list[T]] = []
    total = 0
    for item in items:
        own = size(item) if size else 0
        if not lists or len(lists[-1]) == count or (size and total + own > max_size):
            lists.append([])
            total = 0
        lists[-1].append(item)
        total += own
    return lists


async def each(items: Iterable[T], do: Callable[[T], Awaitable[R]], limit: int = IN_FLIGHT) -> list[R]:
    """`do` of every item, at most `limit` at a time; results in order. All are tried; then the first error is
    raised."""
    slots = asyncio.Semaphore(limit)

    async def one(item: T) -> R:
        async with slots:
            return await do(item)

    tasks = [asyncio.ensure_future(one(item)) for item in items]
    try:
        if tasks:
            await asyncio.wait(tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    for failed in [e for task in tasks if (e := task.exception()) is not None]:
        raise failed
    return [task.result() for task in tasks]
