"""The stream of a gateway to the replicas of its run: requests to attempts that run, and their answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

from rollout.client.connection import Connection
from rollout.model.errors import RolloutError

DATA_MAX = 4 << 20
"""Bytes of one message to a replica, or from one."""


class Replica(NamedTuple):
    """The attempt that answers: its item, and its number."""

    log: int
    seq: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Up:
    """The replica takes requests. Replicas with the same `engine` share one process of `worker`, an incarnation."""

    replica: Replica
    worker: str
    engine: str


@dataclass(frozen=True, slots=True)
class Draining:
    """The replica takes no new requests; it finishes those that it has. Down follows."""

    replica: Replica


@dataclass(frozen=True, slots=True)
class Down:
    """The replica is gone, and with it every request that it has not answered."""

    replica: Replica


@dataclass(frozen=True, slots=True)
class Said:
    """One whole message of a replica."""

    replica: Replica
    data: bytes


@dataclass(frozen=True, slots=True)
class Broken:
    """The coordinator was lost, and every replica with it: each is Down. Up comes again for those that are still there
    once the stream stands again. `error.retryable` is False if it will not: the stream ends with this event."""

    error: RolloutError


Event = Up | Draining | Down | Said | Broken


class ReplicaStream:
    """`async with ReplicaStream(connection, run_id) as stream: async for event in stream: ...`

    Connects by itself, and again whenever it breaks, for ever, to whichever coordinator leads. `connection` is used
    only to find the leader, and may serve other calls at the same time.
    """

    def __init__(self, connection: Connection, run_id: str) -> None:
        self._connection = connection
        self._run_id = run_id

    async def __aenter__(self) -> Self:
        """Returns at once, before the stream stands."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def __aiter__(self) -> AsyncIterator[Event]:
        """One reader at a time."""
        raise NotImplementedError

    def send(self, replica: Replica, data: bytes) -> bool:
        """Never waits. False: the replica is not up, or more than 16 MiB wait to be sent; nothing was sent.

        InputError: more than DATA_MAX bytes.
        """
        raise NotImplementedError
