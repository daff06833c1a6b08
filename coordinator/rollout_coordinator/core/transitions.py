"""Transition tables: (state, cause) -> state. Whatever is not listed cannot happen; trying it raises.

`Table.move` is the only way a state changes: that of items in `items.py`, of runs in `Run.move`, of logs in `Log.move`,
of what a limit leaves in `run_limits.skip_rest`, of workers in `workers.move`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar

from rollout.model.errors import StateError
from rollout.model.item import ItemState
from rollout.model.run import RunState
from rollout.model.worker import WorkerState

S = TypeVar("S", bound=StrEnum)


class Table(Generic[S]):
    """A named transition table."""

    __slots__ = ("name", "rows")

    def __init__(self, name: str, rows: Mapping[tuple[S, str], S]) -> None:
        self.name = name
        self.rows = dict(rows)

    def move(self, state: S, cause: str) -> S:
        """Return the state that `cause` leads to. Raises StateError if the table does not list it."""
        after = self.rows.get((state, cause))
        if after is None:
            allowed = ", ".join(c for s, c in self.rows if s is state) or "nothing"
            raise StateError(f"a {self.name} that is {state.value} does not allow {cause!r}; possible now: {allowed}")
        return after

    def allows(self, state: S, cause: str) -> bool:
        return (state, cause) in self.rows


P, A, R, X = ItemState.PENDING, ItemState.ASSIGNED, ItemState.RUNNING, ItemState.ACCEPTED

ITEM: Table[ItemState] = Table(
    "item",
    {
        (P, "assign"): A,
        (A, "start"): R,
        # a result is durable: `accepted` until the cursor passes it
        (A, "result"): X,  # `started` and the result may travel in one frame, or the start was never told
        (R, "result"): X,
        # the attempt ended, the item did not
        (A, "release"): P,
        (R, "release"): P,
        (A, "revoke"): P,
        (R, "revoke"): P,  # its worker said that it started and gives it up all the same: its word counts
        (A, "retry"): P,
        (R, "retry"): P,
        (A, "worker_lost"): P,
        (R, "worker_lost"): P,
        (A, "drop"): P,
        (R, "drop"): P,
        # closed without a result of its own: lane pruned, group won, dead letter
        (P, "close"): X,
        (A, "close"): X,
        (R, "close"): X,
        # the cursor
        (X, "commit_done"): ItemState.DONE,
        (X, "commit_failed"): ItemState.FAILED,
        (X, "commit_cancelled"): ItemState.CANCELLED,
        (X, "commit_skipped"): ItemState.SKIPPED,
    },
)


class RunPhase(StrEnum):
    """`RunState`, and `pausing`: attempts have not stopped yet. Outside the core such a run is paused."""

    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    INTERRUPTED = "interrupted"
    COMPLETED = "completed"
    FAILED = "failed"
    KILLED = "killed"

    @property
    def state(self) -> RunState:
        return RunState.PAUSED if self is RunPhase.PAUSING else RunState(self.value)


_RUN, _PAUSING, _PAUSED, _INT = RunPhase.RUNNING, RunPhase.PAUSING, RunPhase.PAUSED, RunPhase.INTERRUPTED
_DONE, _FAILED, _KILLED = RunPhase.COMPLETED, RunPhase.FAILED, RunPhase.KILLED

RUN: Table[RunPhase] = Table(
    "run",
    {
        (_RUN, "pause"): _PAUSING,
        (_RUN, "complete"): _DONE,
        (_RUN, "fail"): _FAILED,
        (_RUN, "kill"): _KILLED,
        (_PAUSING, "stopped"): _PAUSED,
        (_PAUSING, "resume"): _RUN,
        (_PAUSING, "complete"): _DONE,  # attempts that were under way may bring the last results
        (_PAUSING, "fail"): _FAILED,
        (_PAUSING, "kill"): _KILLED,
        (_PAUSING, "pause_timeout"): _INT,  # survivors did not stop in time
        (_PAUSED, "resume"): _RUN,
        (_PAUSED, "complete"): _DONE,  # it is sealed, or its last items are cancelled
        (_PAUSED, "fail"): _FAILED,
        (_PAUSED, "kill"): _KILLED,
        (_INT, "continue"): _RUN,
        (_INT, "complete"): _DONE,  # the survivors' results still count
        (_INT, "fail"): _FAILED,
        (_INT, "kill"): _KILLED,
        (_FAILED, "continue"): _RUN,
        (_KILLED, "continue"): _RUN,
    },
)


class LogState(StrEnum):
    """State of a run's items, or of an item's children. `rereading`: outcomes of accepted results are being read from
    the ledger, and the cursor waits for them. `closed`: none of the items will run any more."""

    OPEN = "open"
    REREADING = "rereading"
    CLOSED = "closed"


_OPEN, _READ, _CLOSED = LogState.OPEN, LogState.REREADING, LogState.CLOSED

LOG: Table[LogState] = Table(
    "log",
    {
        (_OPEN, "open"): _OPEN,
        (_CLOSED, "open"): _OPEN,  # its run goes on
        (_OPEN, "reread"): _READ,
        (_READ, "read"): _OPEN,
        (_OPEN, "close"): _CLOSED,
        (_READ, "close"): _CLOSED,
        (_CLOSED, "close"): _CLOSED,
    },
)


class RestState(StrEnum):
    """State of a run's own items that have not begun, if the policy `skip_rest` limits it."""

    TAKEN = "taken"
    SKIPPED = "skipped"


REST: Table[RestState] = Table("rest", {(RestState.TAKEN, "limit"): RestState.SKIPPED})

_JOIN, _READY, _DRAIN = WorkerState.JOINING, WorkerState.READY, WorkerState.DRAINING
_LOST, _GONE, _BAD = WorkerState.FAILED, WorkerState.GONE, WorkerState.QUARANTINED

WORKER: Table[WorkerState] = Table(
    "worker",
    {
        (_JOIN, "hello"): _READY,
        (_JOIN, "hello_draining"): _DRAIN,
        (_JOIN, "silent"): _LOST,
        (_READY, "hello"): _READY,
        (_READY, "hello_draining"): _DRAIN,
        (_READY, "drain"): _DRAIN,
        (_READY, "silent"): _LOST,
        (_READY, "goodbye"): _GONE,
        (_READY, "fault"): _BAD,
        (_DRAIN, "hello"): _DRAIN,  # draining is for good
        (_DRAIN, "hello_draining"): _DRAIN,
        (_DRAIN, "drain"): _DRAIN,
        (_DRAIN, "silent"): _LOST,
        (_DRAIN, "goodbye"): _GONE,
        (_DRAIN, "fault"): _BAD,
        (_LOST, "hello"): _READY,  # the link was away longer than the timeout; its attempts are not current any more
        (_LOST, "hello_draining"): _DRAIN,
    },
)
