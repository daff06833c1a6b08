"""Queues with leases, from which a run's rows may arrive and to which its results may go. `port` is the contract."""

from __future__ import annotations

from collections.abc import Callable

from rollout.config.adapters import load_adapter
from rollout.config.cloud import CloudSection
from rollout.queues.port import Facts, Message, Outgoing, Place, Queue
from rollout.storage.port import Storage

__all__ = ["Facts", "Message", "Outgoing", "Place", "Queue", "open_queue"]

GROUP = "rollout.queues"
QueueFactory = Callable[[Place, CloudSection, Storage | None], Queue]


def open_queue(backend: str, place: Place, cloud: CloudSection, storage: Storage | None = None) -> Queue:
    """Return the queue that `backend` names (sqs, pubsub, local, or an installed package's), not opened yet.

    `storage` holds a "local" queue. Raises ConfigError if there is no such backend.
    """
    factory: QueueFactory = load_adapter(GROUP, backend, "cloud.provider")
    return factory(place, cloud, storage)
