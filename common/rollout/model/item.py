"""Items of work, their states, and the outcomes of attempts."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple


class ItemState(StrEnum):
    PENDING = "pending"
    ASSIGNED = "assigned"
    RUNNING = "running"
    ACCEPTED = "accepted"  # durable, not yet behind the commit cursor
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"


class Outcome(IntEnum):
    """How a result ends its item. The values are those of the wire and of the `result` table."""

    DONE = 1
    FAILED = 2
    CANCELLED = 3
    SKIPPED = 4


class AttemptEnd(StrEnum):
    """How an attempt ended that did not end its item. The `attempt` table keeps it as evidence."""

    FAILED = "failed"  # counted against max_attempts
    TIMEOUT = "timeout"  # counted against max_attempts
    WORKER_LOST = "worker_lost"  # started, and its worker or child process died; counted against max_worker_lost
    RELEASED = "released"  # not started, or given back: counts against nothing
    REVOKED = "revoked"  # stolen before it started
    PAUSED = "paused"
    DROPPED = "dropped"  # pipelined on a predecessor that changed
    STALE = "stale"


HANDED_OVER = "handed_over"
"""Error code of an attempt that was handed over midway: the next attempt continues from its evidence. It is not a
failure."""
HANDED_OVER_MAX = 1024
"""Maximum bytes of that evidence; anything larger is in objects that it names."""
INVALID = "invalid_row"
"""Error code of an item for an unusable row, in a run that continues without it."""


class Key(NamedTuple):
    """The key of an item. `log` is its run's root log or a parent's child log, `seq` its place there."""

    log: int
    seq: int


class ObjectSlice(NamedTuple):
    """Bytes [offset, offset + length) of a stored object. Large payloads and results are such slices."""

    object_id: bytes
    offset: int
    length: int


Blob = bytes | ObjectSlice
"""Inline bytes (at most INLINE_MAX) or a slice of an object."""

INLINE_MAX = 4096
"""Maximum bytes of a payload or result kept inline; larger ones are objects."""


NO_LIMIT = 1_000_000
"""`max_attempts` or `max_worker_lost` of an item that runs until its run ends, such as a replica. It is not suspected
after a loss, so it runs next to others, and its process is not evicted."""


@dataclass(frozen=True, slots=True)
class ItemSpec:
    """What dispatch needs to know of an item. Items share few distinct specs, so rows and frames refer to a table of
    them."""

    lane: str = ""
    chain: str = ""
    resources: tuple[tuple[str, float], ...] = (("slots", 1.0),)
    require_roles: tuple[str, ...] = ()
    require_labels: tuple[tuple[str, str], ...] = ()
    require_plugin: str = ""
    affinity: str = ""
    group: str = ""
    priority: int = 0
    timeout_ms: int = 0
    max_attempts: int = 3
    max_worker_lost: int = 3
    fail_on_worker_lost: bool = False
    exclusive: bool = False
    pipelined: bool = False
    not_before_ms: int = 0
    retry_backoff_ms: int = 1000
    executor: str = ""  # what runs it on a worker (`hosted`); empty: the run's workload
    cost: int = 0  # larger ones are begun earlier, within `reorder_items`: a long one must not run alone at the end


DEFAULT_SPEC = ItemSpec()


def hosted(executor: str) -> str:
    """Return what a worker must host for the executor `NAME` or `NAME:WHICH`: NAME. WHICH selects a section of a run's
    configuration, for example one of two models."""
    return executor.partition(":")[0]


class ItemLimits(NamedTuple):
    """The fields of an ItemSpec that may change while its item has no result."""

    timeout_ms: int
    max_attempts: int
    max_worker_lost: int
    retry_backoff_ms: int


def limits_of(spec: ItemSpec) -> ItemLimits:
    return ItemLimits(spec.timeout_ms, spec.max_attempts, spec.max_worker_lost, spec.retry_backoff_ms)


@dataclass(slots=True)
class NewItem:
    """An item as a client or a parent submits it."""

    id: bytes
    payload: Blob
    spec: ItemSpec = field(default=DEFAULT_SPEC)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt failed. `code` is stable, `message` is for users.

    `retry_after_ms` is the delay until the next attempt, in place of the item's backoff. It is not stored with the
    result.
    """

    code: str
    message: str
    retryable: bool = True
    worker_lost: bool = False
    retry_after_ms: int | None = None
