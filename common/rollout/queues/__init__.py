"""Queues with leases, meant as a run's intake, where rows arrive from outside.

A library so far: no command and no configuration key fills a run from a queue yet.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from rollout.config.adapters import load_adapter
from rollout.queues.port import Message, Queue
from rollout.storage.port import Storage

__all__ = ["Message", "Queue", "open_queue"]

GROUP = "rollout.queues"
QueueFactory = Callable[[dict[str, Any], Storage], Awaitable[Queue]]


async def open_queue(backend: str, options: dict[str, Any], storage: Storage) -> Queue:
    """The queue that `backend` names ("local", or an installed package's). ConfigError if there is none."""
    factory: QueueFactory = load_adapter(GROUP, backend, "queue")
    return await factory(options, storage)
