"""Result of a core step. Its caller has these duties, in order:

1. `writes`: commit all of them in one fenced ledger transaction. If that fails, discard the core and replay. 2.
`sends`: only after that, deliver them, in order. 3. `loads`: read from the ledger and return the answer as an event. 4.
`wake_at`: send a Tick no later than this.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollout.model.errors import RolloutError
from rollout.model.item import AttemptEnd, Blob, Failure, ItemSpec, Key, Outcome
from rollout.model.run import RunSpec, RunState
from rollout.model.worker import Inventory, WorkerState

from rollout_coordinator.core.events import Keys

# Factories of what every step makes anew: `dict[str, RunRow]` would be five times as slow as `dict`.
_dict: Any = dict
_list: Any = list

# ---- writes: rows as the tables of ledger/schema.py hold them


@dataclass(slots=True)
class RunRow:
    """Row of a run; upserted whole, rarely."""

    spec: RunSpec
    state: RunState
    reason: str
    root_log: int
    created_ms: int
    updated_ms: int
    ended_ms: int  # 0: not ended
    pausing_until_ms: int = 0
    survivors: tuple[tuple[int, int, int, str], ...] = ()  # (log, seq, attempt, worker)
    priority: int = 0  # may differ from the spec's after `priority`
    ended_by: str = ""  # who ended it by a command


@dataclass(slots=True)
class LogRow:
    """Counters and cursor of one log; upserted whole, once per log and transaction."""

    log: int
    run_id: str
    parent_log: int  # 0: a root log
    parent_seq: int
    submitted: int
    sealed: bool
    cursor: int  # schedule order: first seq not committed; arrival order: results committed
    done: int
    failed: int
    cancelled: int
    skipped: int
    attempts: int
    retried: int
    worker_lost: int
    stale: int
    units_in: int
    units_out: int
    extra: str = "{}"  # JSON: state of commit-time policies, append origin
    invalid: int = 0  # of the failed: rows of an input that could not be used


@dataclass(slots=True)
class LaneRow:
    run_id: str
    lane: str
    done: int
    failed: int
    consecutive_failures: int
    pruned_at: int  # -1: not pruned


@dataclass(slots=True)
class SpecRow:
    run_id: str
    index: int
    spec: ItemSpec


@dataclass(slots=True)
class ItemRows:
    """Rows to insert, contiguous from `first_seq`."""

    log: int
    first_seq: int
    ids: list[bytes]
    payloads: list[Blob]
    spec: list[int]


@dataclass(slots=True)
class ResultRows:
    """Rows to insert; (log, seq) is the once-only guard: a duplicate is a fault of the core and fails the
    transaction."""

    log: int
    seq: list[int]
    attempt: list[int]
    outcome: list[Outcome]
    data: list[Blob]
    failures: dict[int, Failure]
    duration_ms: list[int]
    units_in: list[int]
    units_out: list[int]
    worker: str
    accepted_ms: int
    position: list[int] | None = None  # arrival order: place in the commit log
    keeps: dict[int, tuple[bytes, ...]] = field(default_factory=_dict)  # by index: objects that the result names
    spared: int = 0  # so many of each of these, the last, stay as long as the run


@dataclass(slots=True)
class AssignmentRow:
    """Batch assigned to a worker in one frame: one row, whatever its size."""

    batch: int
    worker: str
    at_ms: int
    keys: list[Keys]


class Evidence(NamedTuple):
    """What a failed attempt left behind, in the form of a result."""

    data: Blob = b""
    keeps: tuple[bytes, ...] = ()  # objects that `data` names
    units_in: int = 0
    units_out: int = 0

    def __bool__(self) -> bool:
        return bool(len(self.data) or self.keeps or self.units_in or self.units_out)


NO_EVIDENCE = Evidence()


@dataclass(slots=True)
class AttemptRow:
    """End of an attempt that did not end its item; evidence, and the counters of retries."""

    log: int
    seq: int
    attempt: int
    worker: str
    end: AttemptEnd
    code: str
    message: str
    at_ms: int
    not_before_ms: int = 0
    began_ms: int = 0  # 0: it never began
    left: Evidence = NO_EVIDENCE


@dataclass(slots=True)
class WorkerRow:
    incarnation: str
    host_id: str
    inventory: Inventory
    state: WorkerState
    registered_ms: int
    ended_ms: int
    reason: str


HELD = -1
"""In place of the attempt that named an object: a parent keeps it for its children, whichever attempt it is."""


class HeldRow(NamedTuple):
    """Object that the parent (log, seq) keeps for its children; `worker` stored it."""

    log: int
    seq: int
    object_id: bytes
    worker: str


@dataclass(slots=True)
class Writes:
    runs: dict[str, RunRow] = field(default_factory=_dict)
    logs: dict[int, LogRow] = field(default_factory=_dict)
    lanes: dict[tuple[str, str], LaneRow] = field(default_factory=_dict)
    specs: list[SpecRow] = field(default_factory=_list)
    items: list[ItemRows] = field(default_factory=_list)
    results: list[ResultRows] = field(default_factory=_list)
    assignments: list[AssignmentRow] = field(default_factory=_list)
    retired: list[int] = field(default_factory=_list)  # assignment batches with no open attempt left
    attempts: list[AttemptRow] = field(default_factory=_list)
    workers: dict[str, WorkerRow] = field(default_factory=_dict)
    prune: list[tuple[int, int, int]] = field(default_factory=_list)
    """(log, seq, pruned position): accepted results that became skipped_pruned; their outcome changes to SKIPPED."""
    released: list[tuple[int, int]] = field(default_factory=_list)
    """(log, seq) of results whose objects are released."""
    released_attempts: list[tuple[int, int, int]] = field(default_factory=_list)
    """(log, seq, attempt) of attempts whose evidence is released."""
    held: list[HeldRow] = field(default_factory=_list)
    released_held: list[tuple[int, int, bytes]] = field(default_factory=_list)
    """(log, seq, object) of a parent that no longer needs it."""
    deleted_runs: list[str] = field(default_factory=_list)

    def __bool__(self) -> bool:
        return bool(
            self.runs or self.logs or self.lanes or self.specs or self.items or self.results or self.assignments
            or self.retired or self.attempts or self.workers or self.prune or self.released
            or self.released_attempts or self.held or self.released_held or self.deleted_runs
        )  # fmt: skip


# ---- sends


@dataclass(slots=True)
class AssignGroup:
    """Items of one log for one worker. The service adds the run's context the first time on a session."""

    log: int
    run_id: str
    parent: Key | None
    seq: list[int]
    attempt: list[int]
    ids: list[bytes]
    payloads: list[Blob]
    specs: list[ItemSpec]
    isolate: list[int]
    predecessors: list[tuple[int, int, int, Blob]]  # (index, seq, attempt, data)
    failures: dict[int, int] = field(default_factory=_dict)  # by index: attempts that failed before, if any
    handoff: dict[int, bytes] = field(default_factory=_dict)  # by index: what an earlier attempt had done
    losses: dict[int, int] = field(default_factory=_dict)  # by index: attempts that were lost before, if any


@dataclass(slots=True)
class SendWelcome:
    session: str
    keep: list[Keys]
    drop: list[Keys]
    resend: list[Keys]
    accepted: list[Keys]


@dataclass(slots=True)
class SendAssign:
    session: str
    groups: list[AssignGroup]


@dataclass(slots=True)
class SendAccepted:
    session: str
    accepted: list[Keys]
    stale: list[Keys]


@dataclass(slots=True)
class SendRevoke:
    session: str
    revoke_id: int
    keys: list[Keys]


@dataclass(slots=True)
class SendCancel:
    session: str
    keys: list[Keys]
    reason: str


@dataclass(slots=True)
class SendPause:
    session: str
    run_id: str
    deadline_ms: int


@dataclass(slots=True)
class SendResume:
    """Resume a waiting parent."""

    session: str
    parent: Key
    attempt: int


@dataclass(slots=True)
class SendChildren:
    session: str
    parent: Key
    from_child: int
    results: object  # ResultsLoaded
    complete: bool


@dataclass(slots=True)
class SendRunEnded:
    session: str
    run_id: str
    state: str


@dataclass(slots=True)
class SendControl:
    incarnation: str
    verb: str  # drain | reload | log-level
    argument: str
    reason: str = ""


@dataclass(slots=True)
class CloseSession:
    """End the Work stream of a worker that broke the protocol or was superseded."""

    session: str
    error: RolloutError


@dataclass(slots=True)
class Reply:
    """`value` is a SubmitReply, a RunStatus or None, by the request's kind."""

    request: int
    value: Any = None
    error: RolloutError | None = None


@dataclass(slots=True)
class RunMoved:
    """The commit log or the state of a run changed: wake its watchers."""

    run_id: str


@dataclass(slots=True)
class RunConfigured:
    """The run has a new configuration, which workers get with its next items."""

    run_id: str


@dataclass(slots=True)
class Emit:
    """A log event, named in rollout.model.events."""

    event: str
    level: str
    fields: dict[str, Any]
    logged: bool = True
    """Whether it is logged; otherwise it is only stored, for `rollout events`."""


Send = (
    SendWelcome | SendAssign | SendAccepted | SendRevoke | SendCancel | SendPause | SendResume | SendChildren
    | SendRunEnded | SendControl | CloseSession | Reply | RunMoved | RunConfigured | Emit
)  # fmt: skip


@dataclass(slots=True)
class SubmitReply:
    run_id: str
    durable: int  # every seq below is durable
    sealed: bool
    state: RunState
    root_log: int


# ---- loads


@dataclass(slots=True)
class LoadPending:
    """Load rows of `log` from `from_seq` without a result, up to `limit` rows or `max_bytes`; answered by Loaded."""

    load_id: int
    log: int
    from_seq: int
    limit: int
    max_bytes: int


@dataclass(slots=True)
class LoadItems:
    """Load rows that are pending again, whose payloads were dropped on assignment; answered by Loaded."""

    load_id: int
    log: int
    seqs: list[int]


@dataclass(slots=True)
class LoadIds:
    load_id: int
    log: int
    first_seq: int
    count: int


@dataclass(slots=True)
class LoadResults:
    """Load results of `log` with seq in [first_seq, first_seq + limit), in order; answered by ResultsLoaded."""

    load_id: int
    log: int
    first_seq: int
    limit: int
    with_data: bool


@dataclass(slots=True)
class LoadRun:
    """Load an ended run that this core does not remember; answered by RunLoaded. Only with settings.ended_on_disk."""

    load_id: int
    run_id: str


Load = LoadPending | LoadItems | LoadIds | LoadResults | LoadRun


@dataclass(slots=True)
class Step:
    writes: Writes = field(default_factory=Writes)
    sends: list[Send] = field(default_factory=_list)
    loads: list[Load] = field(default_factory=_list)
    wake_at: float | None = None


# ---- replay: what the ledger hands a new leader


@dataclass(slots=True)
class OpenAttempt:
    log: int
    seq: int
    attempt: int
    worker: str
    batch: int
    spec: int
    failures: int
    losses: int
    failed_on: str = ""  # worker of the last attempt that failed
    failed_by: str = ""  # its error code


@dataclass(slots=True)
class Snapshot:
    """Everything that has not ended; ended runs are left on disk."""

    runs: list[RunRow] = field(default_factory=list[RunRow])
    logs: list[LogRow] = field(default_factory=list[LogRow])
    lanes: list[LaneRow] = field(default_factory=list[LaneRow])
    specs: list[SpecRow] = field(default_factory=list[SpecRow])
    workers: list[WorkerRow] = field(default_factory=list[WorkerRow])
    open_attempts: list[OpenAttempt] = field(default_factory=list[OpenAttempt])
    accepted: dict[int, list[tuple[int, int]]] = field(default_factory=dict[int, list[tuple[int, int]]])
    """Ranges [first, last] of seqs at or after the cursor that have a result, by log (schedule order)."""
    won: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    """(log, spec, seq): the first committed item of the spec that is done, in logs of runs that know groups."""
    next_log: int = 1
    next_batch: int = 1
