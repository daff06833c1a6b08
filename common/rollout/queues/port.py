"""A queue with leases, for rows that arrive from outside; no run takes its items from one yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Message:
    id: str  # ULID of the enqueue; order of delivery is the order of these
    body: bytes
    receipt: str  # of this delivery; a later delivery has another
    deliveries: int


class Queue(Protocol):
    async def enqueue(self, bodies: list[bytes]) -> list[str]:
        """Durable on return."""
        ...

    async def dequeue(self, limit: int, lease_s: float, wait_s: float = 0.0) -> list[Message]: ...

    async def extend(self, message: Message, lease_s: float) -> bool:
        """False: the lease was lost."""
        ...

    async def ack(self, messages: list[Message]) -> None: ...
    async def nack(self, messages: list[Message]) -> None: ...
    async def depth(self) -> int: ...
    async def close(self) -> None: ...
