"""Calls of a store that is open. What a person must mend then (credentials that expired, a permission that was taken
away) is no fault of the work in hand: it waits, as for a store that does not answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import wraps
from types import CoroutineType
from typing import Any, ParamSpec, TypeVar

from rollout.model.errors import ConfigError, StorageUnavailableError

P = ParamSpec("P")
T = TypeVar("T")


def running(call: Callable[P, CoroutineType[Any, Any, T]]) -> Callable[P, CoroutineType[Any, Any, T]]:
    """`call`, but StorageUnavailableError with the same text where it raises ConfigError."""

    @wraps(call)
    async def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await call(*args, **kwargs)
        except ConfigError as e:
            raise StorageUnavailableError(e.message) from e

    return wrapped


def running_stream(call: Callable[P, AsyncGenerator[T]]) -> Callable[P, AsyncGenerator[T]]:
    """As `running`, of a generator."""

    @wraps(call)
    async def wrapped(*args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[T]:
        try:
            async with aclosing(call(*args, **kwargs)) as found:
                async for one in found:
                    yield one
        except ConfigError as e:
            raise StorageUnavailableError(e.message) from e

    return wrapped
