"""A queue with leases: where a run's rows arrive from, and where its results may go.

Adapters register under the entry point group `rollout.queues`, as a function
`open_queue(Place, CloudSection, Storage | None) -> Queue`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from rollout.model.errors import RolloutError, UnavailableError

DEDUPLICATION = "rollout.deduplication"
"""Attribute that carries `Outgoing.deduplication` through a queue that knows of no such thing."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which queue. `address`: a queue's URL, a subscription (input) or a topic (output), or a local name. `lease_s`: of
    the configuration."""

    address: str
    way: Literal["input", "output"] = "input"
    lease_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Message:
    """`id`: the service's, the same at each delivery. `receipt`: of this delivery; a later one has another.
    `deliveries`: this one included; 0: the service does not tell. `group`: those of one come one after the other."""

    id: str
    body: bytes
    receipt: str
    deliveries: int
    attributes: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    group: str = ""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """`deduplication`: two that have the same are one to a queue that knows of that, and others carry it as an
    attribute."""

    body: bytes
    attributes: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    group: str = ""
    deduplication: str = ""

    @property
    def all_attributes(self) -> dict[str, str]:
        """For a queue that knows of no deduplication."""
        return {**self.attributes, **({DEDUPLICATION: self.deduplication} if self.deduplication else {})}


@dataclass(frozen=True, slots=True)
class Facts:
    """What a queue can do. Bytes of a message count its attributes. `max_held_s`: from receipt on, however often it is
    extended. `ordered`: those of a group come in order, and a held one blocks those behind it. `exactly_once`: an
    acknowledgement counts only once the service confirms it. `dead_letter`: where a message goes after
    `max_deliveries`; empty: nowhere. `remarks`: for people, such as what could not be read and was assumed."""

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
    """Whether a call may be made again later: the service is away, or a person can make it answer without a change of
    the configuration, by new credentials or by making the queue again."""
    return isinstance(error, UnavailableError) or error.context.get("failure") in ("credentials", "missing")


class Queue(Protocol):
    """Errors: UnavailableError while the service cannot be reached or throttles (after its budget), ConfigError for
    what a person must mend: no such queue, no permission. StateError after `close`. Batches of any size: adapters cut
    them as the service wants. After an UnavailableError of `extend`, `ack` or `nack` nothing is known of the messages:
    the whole call may be made again, which does no harm to those that had been done. `extend` and `ack` also take a
    message of which only `id` and `receipt` are known: another process received it."""

    async def open(self) -> None:
        """Asks the service for `facts`."""
        ...

    async def close(self) -> None:
        """Gives back what was received and not handed out. Leases of what was handed out run on."""
        ...

    @property
    def facts(self) -> Facts: ...

    def fits(self, message: Outgoing) -> bool:
        """Whether the queue takes it, as it would be encoded."""
        ...

    async def enqueue(self, messages: list[Outgoing]) -> list[str]:
        """Durable on return; their ids. InputError, before anything is sent: the queue does not take one,
        `context["index"]`."""
        ...

    async def dequeue(self, limit: int, lease_s: float, wait_s: float = 0.0) -> list[Message]:
        """At most `limit`, each under a lease of `lease_s` from now on; empty where nothing came in `wait_s`. It
        returns what is there, and does not wait until it has `limit`."""
        ...

    async def extend(self, messages: list[Message], lease_s: float) -> list[Message]:
        """Their leases end in `lease_s` from now. Returns those whose lease was lost already."""
        ...

    async def ack(self, messages: list[Message]) -> list[Message]:
        """For good. Returns those that may come again: their lease was lost, or the service did not confirm."""
        ...

    async def nack(self, messages: list[Message]) -> None:
        """To be delivered again at once, here or elsewhere. A lease that was lost meanwhile is no error."""
        ...

    async def depth(self) -> int | None:
        """Messages that wait, about; None: the service does not tell."""
        ...

    async def is_empty(self, lease_s: float) -> bool:
        """Whether the service, asked once more, has nothing to give. What it gives is handed out by the next
        `dequeue`. Unlike an empty `dequeue`, which may not have been answered, it says so with UnavailableError."""
        ...
