"""Batches for the calls of a queue service."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from rollout.cloud.parallel import gathered

T = TypeVar("T")
R = TypeVar("R")

IN_FLIGHT = 16
"""Maximum number of concurrent calls."""


def cut(items: Sequence[T], count: int, size: Callable[[T], int] | None = None, max_size: int = 0) -> list[list[T]]:
    """Cut items, in order, into lists of at most `count` items and `max_size` in total by `size`; an item may exceed it
    alone."""
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


async def each(items: Iterable[T], do: Callable[[T], Awaitable[R]]) -> list[R]:
    """Call `do` for every item, at most `IN_FLIGHT` concurrently, and return results in order.

    All items are tried; then the first error is raised.
    """

    async def tried(item: T) -> R | Exception:
        try:
            return await do(item)
        except Exception as error:  # noqa: BLE001 - raised when all were tried
            return error

    found: list[R] = []
    for one in await gathered(tried, items, IN_FLIGHT):
        if isinstance(one, Exception):
            raise one
        found.append(one)
    return found
