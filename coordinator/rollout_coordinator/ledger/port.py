"""Values that go into the ledger and come out of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from rollout.model.errors import FencedError
from rollout.model.item import Blob, Failure, Outcome


class Fence(NamedTuple):
    """The transaction succeeds only if the lease row still has this epoch and batch; then `batch` is incremented."""

    epoch: int
    batch: int

    def lost(self) -> FencedError:
        """Return the error to raise if the row has changed."""
        return FencedError(f"the lease is no longer at epoch {self.epoch}, batch {self.batch}: nothing was written")


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """The lease row. A swap compares all of it; `beat` grows with every renewal so that bytes change."""

    holder: str
    epoch: int
    batch: int
    beat: int
    released: bool  # a clean stop: may be stolen at once
    address: str  # where clients and workers reach the holder


@dataclass(slots=True)
class CommitPage:
    """A piece of a commit log, in columns, in commit order from position `from_cursor`."""

    from_cursor: int
    seq: list[int]
    attempt: list[int]
    outcome: list[Outcome]
    data: list[Blob]
    failures: dict[int, Failure]
    duration_ms: list[int]
    accepted_ms: list[int]
    worker: list[str]
    units_in: list[int]
    units_out: list[int]
    tries: list[int]  # attempts that began, the last one included
    ids: list[bytes]  # empty unless payloads were asked for
    payloads: list[Blob]


class Which(StrEnum):
    """The rows of a log to select. The ledger cannot tell what is in flight: OPEN has no result."""

    ALL = "all"
    FAILED = "failed"  # for good
    RETRIED = "retried"  # an attempt began and came to nothing
    OPEN = "open"


class Seqs(NamedTuple):
    """A page of rows: continue from `next_seq` unless `end`. A page is bounded and may be empty."""

    seqs: list[int]
    next_seq: int
    end: bool


@dataclass(slots=True)
class ItemStateRow:
    """A row's state in the ledger: open, accepted, done, failed, cancelled or skipped."""

    seq: int
    id: bytes
    state: str
    tries: int  # attempts that began and have ended
    worker: str  # that ended it
    at_ms: int  # when; 0: it is open
    duration_ms: int
    code: str
    message: str


@dataclass(slots=True)
class EndedAttempt:
    """An attempt that ended without ending its item. `began_ms` is 0 if it never began."""

    attempt: int
    worker: str
    ending: str
    code: str
    message: str
    began_ms: int
    at_ms: int
    units_in: int = 0
    units_out: int = 0
    data: Blob = b""  # what it left behind


class AttemptAt(NamedTuple):
    seq: int
    ended: EndedAttempt


@dataclass(slots=True)
class ItemRecord:
    state: ItemStateRow
    spec: int  # index of its spec in the run's table
    payload: Blob
    result: Blob | None
    attempt: int  # that made the result; 0: none did
    units_in: int  # of that
    units_out: int
    ended: list[EndedAttempt]  # the newest, in order


@dataclass(slots=True)
class FailureRow:
    """A row, or an attempt at one, that failed."""

    seq: int
    attempt: int
    code: str
    message: str
    worker: str
    at_ms: int
    final: bool  # the row failed for good


class ChildLog(NamedTuple):
    log: int
    submitted: int
    cursor: int


class FoundRun(NamedTuple):
    """The properties by which users tell runs apart."""

    run_id: str
    workload: str
    name: str
    state: str
    created_ms: int


OUTPUT_HEAD, OUTPUT_TAIL = 1 << 20, 7 << 20
"""Bytes kept of a run's output: the first and the newest."""
OUTPUT_ALL = 512 << 20
"""Maximum bytes of output of all runs together; beyond it, that of the oldest runs is removed first."""
EVENTS_KEPT, EVENTS_OF_RUN = 10_000, 1000
"""Number of newest events kept, of all and of one run."""


class NewOutput(NamedTuple):
    """Lines of a run, as a worker shipped them."""

    run_id: str
    worker: str
    lines: bytes


class OutputRow(NamedTuple):
    """`position` is the number of bytes of the run's output up to its end; gaps between rows were left out."""

    position: int
    size: int
    worker: str
    lines: bytes


class NewEvent(NamedTuple):
    at_ms: int
    event: str
    level: str
    run_id: str  # empty: it belongs to no run
    fields: str  # JSON


class EventRow(NamedTuple):
    number: int
    at_ms: int
    event: str
    level: str
    fields: str


class EventsOf(NamedTuple):
    """A run, and events without a run from `from_ms` to `to_ms`; an empty `run_id` means everything."""

    run_id: str = ""
    from_ms: int = 0
    to_ms: int = 0


class KeptRow(NamedTuple):
    """A kept object. `attempt` is the failed attempt that left it, 0 if the item's result names it."""

    seq: int
    object_id: bytes
    attempt: int = 0


class LetGoRow(NamedTuple):
    """An object that was named. `worker` stored it for a result, a failed attempt or children."""

    log: int
    seq: int
    object_id: bytes
    worker: str
