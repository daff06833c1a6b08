"""Queues with leases, meant as a run's intake, where rows arrive from outside.

A library so far: no command and no configuration key fills a run from a queue yet.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.metadata import entry_points
from typing import Any, cast

from rollout.model.errors import ConfigError
from rollout.queues.port import Message, Queue
from rollout.storage.port import Storage

__all__ = ["Message", "Queue", "open_queue"]

GROUP = "rollout.queues"
QueueFactory = Callable[[dict[str, Any], Storage], Awaitable[Queue]]


async def open_queue(backend: str, options: dict[str, Any], storage: Storage) -> Queue:
    """The queue that `backend` names ("local", or an installed package's). ConfigError if there is none."""
    found = entry_points(group=GROUP)
    if backend not in found.names:
        raise ConfigError(
            f'queue backend "{backend}" is not installed; known: {", ".join(sorted(found.names)) or "none"}. '
            f"A package provides one through the entry point group {GROUP}"
        )
    return await cast(QueueFactory, found[backend].load())(options, storage)
