"""What the coordinator needs of its durable store. Two adapters, one schema, one conformance suite."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from rollout.model.errors import FencedError
from rollout.model.item import Blob, Failure, Outcome

from rollout_coordinator.core.events import IdsLoaded, Loaded, ResultsLoaded
from rollout_coordinator.core.step import LoadIds, LoadItems, LoadPending, LoadResults, Snapshot, WorkerRow, Writes
from rollout_coordinator.core.views import RunView


class Fence(NamedTuple):
    """The transaction goes through iff the lease row still has this epoch and batch; then `batch` is one more."""

    epoch: int
    batch: int

    def lost(self) -> FencedError:
        """What to raise when the row has changed."""
        return FencedError(f"the lease is no longer at epoch {self.epoch}, batch {self.batch}: nothing was written")


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """The one row. Compared whole when it is swapped; `beat` grows with every renewal so that bytes change."""

    holder: str
    epoch: int
    batch: int
    beat: int
    released: bool  # a clean stop: may be stolen at once
    address: str  # where clients and workers reach the holder


@dataclass(slots=True)
class CommitPage:
    """A piece of a commit log, columnar, in commit order from position `from_cursor`."""

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
    """Rows of a log that are asked for. What is in flight the ledger cannot tell: OPEN has no result."""

    ALL = "all"
    FAILED = "failed"  # for good
    RETRIED = "retried"  # an attempt began and came to nothing
    OPEN = "open"


class Seqs(NamedTuple):
    """A page of rows: ask on from `next_seq` unless `end`. It may be empty all the same: a page is bounded."""

    seqs: list[int]
    next_seq: int
    end: bool


@dataclass(slots=True)
class ItemStateRow:
    """What a row has come to, as the ledger knows it. `state`: open, accepted, done, failed, cancelled or skipped."""

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
    """An attempt that ended and did not end its item. `began_ms`: 0: it never began."""

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
    """As much of a run as a person needs to tell it from others."""

    run_id: str
    workload: str
    name: str
    state: str
    created_ms: int


OUTPUT_HEAD, OUTPUT_TAIL = 1 << 20, 7 << 20
"""Bytes of a run's output that are kept: the first and the newest."""
OUTPUT_ALL = 512 << 20
"""Bytes of output of all runs together: beyond it that of the oldest runs goes first."""
EVENTS_KEPT, EVENTS_OF_RUN = 10_000, 1000
"""The newest of all, and of one run."""


class NewOutput(NamedTuple):
    """Lines of a run, as a worker shipped them."""

    run_id: str
    worker: str
    lines: bytes


class OutputRow(NamedTuple):
    """`position`: bytes of the run's output up to its end; what lies between two rows was left out."""

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
    """A run, and what belonged to no run from `from_ms` to `to_ms`; an empty `run_id`: everything."""

    run_id: str = ""
    from_ms: int = 0
    to_ms: int = 0


class KeptRow(NamedTuple):
    """An object that is kept. `attempt`: that failed and left it behind; 0: the item's result names it."""

    seq: int
    object_id: bytes
    attempt: int = 0


class LetGoRow(NamedTuple):
    """An object that was named. `worker`: that stored it for a result, a failed attempt or children."""

    log: int
    seq: int
    object_id: bytes
    worker: str


class Ledger(Protocol):
    async def open(self) -> None:
        """Connect and migrate. SchemaVersionError if the database is newer than this program."""
        ...

    async def close(self) -> None: ...

    # lease -- each its own transaction
    async def read_lease(self) -> LeaseRow | None: ...
    async def insert_lease(self, row: LeaseRow) -> bool:
        """From absent. False: somebody was faster."""
        ...

    async def swap_lease(self, old: LeaseRow, new: LeaseRow) -> bool:
        """CAS over every field of `old`."""
        ...

    async def renew_lease(self, holder: str, epoch: int) -> bool:
        """`beat` + 1, whatever `batch` is. False: another epoch, fenced."""
        ...

    # the one writer
    async def commit(self, fence: Fence, writes: Writes) -> None:
        """All of `writes` in one transaction under `fence`, durable on return.

        An unknown outcome is resolved inside by reading `batch`. FencedError: the lease moved, nothing was written.
        StorageFullError, StorageUnavailableError: nothing was written.
        """
        ...

    async def trim_output(self, most: int) -> list[tuple[str, int]]:
        """Remove the output of whole runs, the oldest first, until all has `most` bytes: (run, bytes) of each. A reader
        sees how much is missing."""
        ...

    async def purge(self, limit: int) -> int:
        """Remove about `limit` rows of deleted runs, in its own transaction; 0: nothing is left. For idle times."""
        ...

    async def forget_workers(self, before_ms: int, limit: int) -> int:
        """Remove up to `limit` rows of workers that ended before `before_ms` (unix time); how many. As `purge`."""
        ...

    async def record(self, epoch: int, outputs: list[NewOutput], events: list[NewEvent]) -> None:
        """Adds to the history in a transaction of its own, and drops what is over its bounds.

        FencedError when the lease is at another epoch: nothing was written. Output of a run that is not there is not
        wanted. Where the outcome is unknown, StorageUnavailableError: it may be there, and may be recorded again.
        """
        ...

    async def output(self, run_id: str, after: int, max_bytes: int) -> list[OutputRow]:
        """In order, from behind position `after`; at least one, if there is any."""
        ...

    async def events(self, of: EventsOf, after: int, limit: int) -> list[EventRow]:
        """In order, from behind number `after`."""
        ...

    async def newest_events(self, of: EventsOf, limit: int) -> list[EventRow]:
        """The newest, in order."""
        ...

    # reads
    async def snapshot(self) -> Snapshot: ...
    async def run_snapshot(self, run_id: str) -> Snapshot | None:
        """One run in any state, with its logs, lanes, specs and accepted ranges; no workers, no open attempts."""
        ...

    async def pending(self, load: LoadPending) -> Loaded: ...
    async def items(self, load: LoadItems) -> Loaded: ...
    async def ids(self, load: LoadIds) -> IdsLoaded: ...
    async def results(self, load: LoadResults) -> ResultsLoaded: ...
    async def commit_log(self, log: int, cursor: int, limit: int, max_bytes: int, payloads: bool) -> CommitPage:
        """From position `cursor` up to the log's commit cursor; empty at its end."""
        ...

    async def run_view(self, run_id: str) -> RunView | None:
        """An ended run, from its rows (in_flight, running are 0). Also for a run the core knows: counters as stored."""
        ...

    async def run_views(self, states: tuple[str, ...], limit: int) -> list[RunView]:
        """Newest first; empty `states`: all."""
        ...

    async def find_runs(self, text: str, *, complete: bool, limit: int) -> list[FoundRun]:
        """Those whose id, or the end of it that people see, begins with `text`, or whose name it is (`complete`: begins
        with it); newest first."""
        ...

    async def workers(self, limit: int) -> list[WorkerRow]:
        """Newest first, ended ones too."""
        ...

    async def workers_at(self, incarnations: list[str]) -> list[WorkerRow]:
        """Those of these that are known (still)."""
        ...

    async def seqs(self, log: int, which: Which, from_seq: int, limit: int) -> Seqs:
        """Rows of a log from `from_seq` on, ascending, `limit` at most."""
        ...

    async def item_states(self, log: int, seqs: list[int]) -> list[ItemStateRow]:
        """In order; those that are not there are left out."""
        ...

    async def item(self, log: int, seq: int, attempts: int) -> ItemRecord | None:
        """A row with at most `attempts` of its attempts that ended without ending it."""
        ...

    async def attempts(self, log: int, after: tuple[int, int], limit: int, max_bytes: int) -> list[AttemptAt]:
        """Attempts that began and came to nothing, in order, behind (seq, attempt); at least one, if there is any."""
        ...

    async def child_log(self, log: int, seq: int) -> ChildLog | None:
        """The log of a row's children."""
        ...

    async def last_failures(self, log: int, limit: int) -> list[FailureRow]:
        """Rows that failed for good and attempts that failed or were lost, the newest first."""
        ...

    async def kept(self, run_id: str) -> list[KeptRow]:
        """Each object that a result of the run's own items names, or a failed attempt at one, by seq and object."""
        ...

    async def release(self, epoch: int, run_id: str, seqs: list[int]) -> None:
        """What the results of these items name, and attempts at them, is kept no longer, and is to be freed.
        FencedError: `epoch` is over."""
        ...

    async def to_free(self, limit: int) -> list[LetGoRow]:
        """Objects that were let go and not yet freed."""
        ...

    async def freed(self, epoch: int, rows: list[LetGoRow]) -> None:
        """These are done with. FencedError: `epoch` is over."""
        ...

    async def referenced(self, object_ids: list[bytes]) -> set[bytes]:
        """Which of these objects a payload, result or failed attempt of any run refers to (for garbage collection)."""
        ...

    async def run_objects(self, run_id: str) -> set[bytes]:
        """Objects that a run's payloads, results and failed attempts refer to."""
        ...
