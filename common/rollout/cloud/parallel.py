"""Concurrent calls of a service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


async def gathered(work: Callable[[T], Coroutine[Any, Any, R]], items: Iterable[T], parallel: int) -> list[R]:
    """Return the results in the order of `items`. The first error cancels the others and is raised when they have
    ended."""
    slots = asyncio.Semaphore(parallel)

    async def one(item: T) -> R:
        async with slots:
            return await work(item)

    tasks = [asyncio.create_task(one(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def each(work: Callable[[T], Coroutine[Any, Any, None]], items: AsyncIterator[T], parallel: int) -> None:
    """Call `work` for items as they come; the next item is fetched while others run. Raises errors as `gathered`
    does."""
    running: set[asyncio.Task[None]] = set()
    try:
        async for item in items:
            while len(running) >= parallel:
                running = await _one_done(running)
            running.add(asyncio.create_task(work(item)))
        while running:
            running = await _one_done(running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _one_done(running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    done, left = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    return left
