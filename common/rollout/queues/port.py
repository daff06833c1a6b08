"""Port of queues with leases, from which a run's rows arrive and to which its results may go.

Adapters register under the entry point group `rollout.queues`, as a function `open_queue(Place, CloudSection, Storage |
None) -> Queue`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from rollout.model.errors import RolloutError, UnavailableError

DEDUPLICATION = "rollout.deduplication"
"""Attribute that carries `Outgoing.deduplication` through a queue without deduplication."""


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a queue. `address` is a URL, a subscription (input), a topic (output) or a local name; `lease_s` is
    configured."""

    address: str
    way: Literal["input", "output"] = "input"
    lease_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Message:
    """Received message.

    `id` is the service's and the same at each delivery. `receipt` belongs to this delivery. `deliveries` includes this
    one; 0 means that the service does not tell. Messages of one `group` are delivered one after the other.
    """

    id: str
    body: bytes
    receipt: str
    deliveries: int
    attributes: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    group: str = ""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Message to send. Messages with the same `deduplication` are one to a queue that supports it; others carry it as
    an attribute."""

    body: bytes
    attributes: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    group: str = ""
    deduplication: str = ""

    @property
    def all_attributes(self) -> dict[str, str]:
        """Attributes for a queue without deduplication."""
        return {**self.attributes, **({DEDUPLICATION: self.deduplication} if self.deduplication else {})}


@dataclass(frozen=True, slots=True)
class Facts:
    """Capabilities of a queue.

    The bytes of a message include its attributes. `max_held_s` counts from receipt, however often the lease is
    extended. `ordered`: messages of a group come in order, and a held one blocks those behind it. `exactly_once`: an
    acknowledgement counts only once the service confirms it. `dead_letter` is where a message goes after
    `max_deliveries`, or empty. `remarks` are for people, such as what could not be read and was assumed.
    """

    name: str
    max_lease_s: float
    max_held_s: float
    max_in_flight: int
    max_message_bytes: int
    ordered: bool = False
    exactly_once: bool = False
    max_deliveries: int | None = None
    dead_letter: str = ""
    min_lease_s: float = 0.0
    remarks: tuple[str, ...] = ()


def may_pass(error: RolloutError) -> bool:
    """Return whether a call may succeed later without a change of the configuration: the service is away, credentials
    are to be renewed, or the queue is to be created again."""
    return isinstance(error, UnavailableError) or error.context.get("failure") in ("credentials", "missing")


class Queue(Protocol):
    """Queue with leases.

    Every method raises UnavailableError if the service is unreachable or throttles beyond the retry budget, ConfigError
    for what a user must mend (no such queue, no permission), and StateError after `close`. Batches may have any size:
    adapters cut them as the service requires. After an UnavailableError of `extend`, `ack` or `nack` the outcome is
    unknown; the whole call may be repeated without harm. `extend` and `ack` accept a message of which only `id` and
    `receipt` are known, because another process received it.
    """

    async def open(self) -> None:
        """Connect, and ask the service for `facts`."""
        ...

    async def close(self) -> None:
        """Return messages that were received but not handed out. Leases of the others continue."""
        ...

    @property
    def facts(self) -> Facts: ...

    def fits(self, message: Outgoing) -> bool:
        """Return whether the queue accepts the message as it would be encoded."""
        ...

    async def enqueue(self, messages: list[Outgoing]) -> list[str]:
        """Send messages, durably on return, and return their ids.

        Raises InputError, before anything is sent, if the queue does not accept one (`context["index"]`).
        """
        ...

    async def dequeue(self, limit: int, lease_s: float, wait_s: float = 0.0) -> list[Message]:
        """Return at most `limit` messages, each under a lease of `lease_s` from now; an empty list if none came in
        `wait_s`.

        It returns what is there and does not wait for `limit` messages.
        """
        ...

    async def extend(self, messages: list[Message], lease_s: float) -> list[Message]:
        """Set the leases to end in `lease_s` from now. Returns the messages whose lease was already lost."""
        ...

    async def ack(self, messages: list[Message]) -> list[Message]:
        """Acknowledge messages for good. Returns those that may be delivered again: the lease was lost, or the service
        did not confirm."""
        ...

    async def nack(self, messages: list[Message]) -> None:
        """Return messages for immediate redelivery, here or elsewhere. A lost lease is no error."""
        ...

    async def depth(self) -> int | None:
        """Return the approximate number of waiting messages, or None if the service does not tell."""
        ...

    async def is_empty(self, lease_s: float) -> bool:
        """Return whether the service, asked once more, has no message. The next `dequeue` hands out what it returns.

        Unlike an empty `dequeue`, which may not have been answered, it raises UnavailableError without an answer.
        """
        ...
