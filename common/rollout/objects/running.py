"""Calls of an open store.

An error that a user must mend (expired credentials, a permission that was withdrawn) is no fault of the work in
progress: the work waits, as for a store that does not answer.
"""

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
    """Wrap `call` so that ConfigError becomes StorageUnavailableError with the same text."""

    @wraps(call)
    async def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await call(*args, **kwargs)
        except ConfigError as e:
            raise StorageUnavailableError(e.message) from e

    return wrapped


def running_stream(call: Callable[P, AsyncGenerator[T]]) -> Callable[P, AsyncGenerator[T]]:
    """Wrap a generator as `running` wraps a coroutine."""

    @wraps(call)
    async def wrapped(*args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[T]:
        try:
            async with aclosing(call(*args, **kwargs)) as found:
                async for one in found:
                    yield one
        except ConfigError as e:
            raise StorageUnavailableError(e.message) from e

    return wrapped
