"""Memory of the core: plain mutable records, the step under construction, and the effects of its events.

Memory grows with what is in flight and in the window, not with the size of a run: accepted results are ranges, items in
flight share one `AttemptBatch` per (frame, log, spec), and pending items are in columnar chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field, replace
from itertools import count
from math import ceil
from typing import Any, NamedTuple

from rollout.model.errors import RolloutError
from rollout.model.item import Blob, ItemSpec, Key, hosted
from rollout.model.run import Order, RunSpec, RunState
from rollout.model.worker import Credit, Inventory, WorkerState

from rollout_coordinator.core.events import Event, Keys, Now, SubmitItems, SubmitSeal, WorkerSpawn
from rollout_coordinator.core.limits import Limits
from rollout_coordinator.core.progress import Progress
from rollout_coordinator.core.ranges import Ranges
from rollout_coordinator.core.reasons import Reasons
from rollout_coordinator.core.settings import CoreSettings
from rollout_coordinator.core.step import LaneRow, Load, LogRow, Reply, RunRow, Step, WorkerRow
from rollout_coordinator.core.transitions import LOG, RUN, LogState, RestState, RunPhase
from rollout_coordinator.core.views import CauseView

NEVER = float("inf")
_BEFORE = Now(0.0, 0)
ROOT_RANK = 1 << 62  # children before the root log: a parent that waits for them holds work open

# Factories of what is made anew all the time: `dict[str, Run]` would be five times as slow as `dict`.
_dict: Any = dict
_list: Any = list
_set: Any = set

# ---- pending items


class History(NamedTuple):
    """History of an item's earlier attempts."""

    attempts: int = 0  # highest attempt number so far
    failures: int = 0
    losses: int = 0
    not_before: float = 0.0  # monotonic, unlike the row's: a wall clock that jumps delays no retry
    to: str = ""  # incarnation that asked for it by stealing
    failed_on: str = ""  # incarnation that had the last attempt which failed: the next goes to another, if it can
    failed_by: str = ""  # error code of that attempt


FRESH = History()


class Chunk:
    """Pending items of one spec that were never tried, columnar; `pos` is the first not taken."""

    __slots__ = ("ids", "payloads", "pos", "seqs")

    def __init__(self, seqs: list[int], ids: list[bytes], payloads: list[Blob]) -> None:
        self.seqs, self.ids, self.payloads, self.pos = seqs, ids, payloads, 0


class Requirements:
    """Requirements on a worker, checked once per worker for all specs of a run with equal ones."""

    __slots__ = (
        "executor", "hosted", "key", "labels", "limits", "plugin", "roles", "run_id", "slots", "strict",
    )  # fmt: skip

    def __init__(self, spec: ItemSpec, workload: str, run_id: str) -> None:
        self.run_id = run_id
        self.executor = spec.executor or workload
        self.hosted = hosted(self.executor)
        # Its worth, not its identity: the address of a run that is forgotten may be that of a later one's.
        self.key = (self.executor, spec.require_roles, spec.require_labels, spec.require_plugin, spec.resources)
        self.roles = frozenset(spec.require_roles)
        self.labels = spec.require_labels
        self.plugin = spec.require_plugin
        asked = dict(spec.resources)
        self.slots = asked.get("slots", 0.0)
        self.limits = (ceil(asked.get("gpus", 0.0)), ceil(asked.get("memory_mib", 0.0)))  # of a process of its own
        self.strict = tuple((name, amount) for name, amount in spec.resources if name != "slots" and amount > 0)


@dataclass(slots=True, eq=False)
class SpecInfo:
    """A spec of a run, with what dispatch needs resolved."""

    index: int
    spec: ItemSpec
    lane: LaneState
    requirements: Requirements


@dataclass(slots=True, eq=False)
class SpecQueue:
    """Pending items of one log and spec that are in memory."""

    log: Log
    info: SpecInfo
    chain: Chain | None
    chunks: deque[Chunk] = field(default_factory=deque[Chunk])
    retry: list[tuple[int, bytes, Blob, History]] = field(default_factory=_list)  # heap by seq: items tried before
    avoid_worker: str = ""  # its items failed last on this worker: they are for another, if there is one
    size: int = 0
    queued: bool = False  # it is ready, or waits
    home: str | None = None  # in which of `Homes.heaps` it is

    def __lt__(self, other: SpecQueue) -> bool:
        return False  # keys in a heap are equal where an empty queue from before a kill meets its successor

    def head(self) -> int:
        """Return the seq of its first item."""
        head = self.chunks[0].seqs[self.chunks[0].pos] if self.chunks else ROOT_RANK
        return min(head, self.retry[0][0]) if self.retry else head


# ---- runs and their logs


@dataclass(slots=True, eq=False)
class LaneState:
    name: str
    cap: int
    in_flight: int = 0
    done: int = 0
    failed: int = 0
    consecutive: int = 0  # failures
    pruned_at: int = -1

    def row(self, run_id: str) -> LaneRow:
        return LaneRow(run_id, self.name, self.done, self.failed, self.consecutive, self.pruned_at)


@dataclass(slots=True, eq=False)
class Chain:
    """Items of one log that run one at a time, in order."""

    name: str
    known: bool  # False after a replay, until `last_done` was looked up
    members: list[int] = field(default_factory=_list)  # heap of seqs in memory or in flight, not accepted
    flying: dict[int, AttemptBatch] = field(default_factory=_dict)
    last_worker: str = ""
    free_at: float = 0.0
    last_done: tuple[int, int, Blob] | None = None  # (seq, attempt, data) of the last item that is done
    looking_back: bool = False


class Log:
    """The items of a run, or the child items of one of its items: an ordered log with a cursor of its own."""

    __slots__ = (
        "accepted", "appending", "attempts", "by_arrival", "chains", "checking", "children", "closed",
        "counts", "cursor", "flight", "groups", "held", "id", "invalid", "loaded_ahead", "loading",
        "loading_returned", "members", "outcomes", "parent", "progress", "queues", "rank", "reader", "readings",
        "replayed", "rereading", "retried", "returned", "run", "sealed", "stale", "state", "submitted", "units_in",
        "units_out", "window", "window_bytes", "window_end", "worker_lost",
    )  # fmt: skip

    def __init__(self, log: int, run: Run, parent: Key | None) -> None:
        self.id, self.run, self.parent = log, run, parent
        self.rank = log if parent else ROOT_RANK
        self.by_arrival = parent is None and run.spec.order is Order.ARRIVAL  # children are read by ordinal
        self.state = LogState.OPEN
        self.closed = self.rereading = False  # by `state`
        self.readings = 0  # of accepted results, begun
        # what its row says
        self.submitted = self.cursor = 0
        self.sealed = False
        self.counts = [0, 0, 0, 0, 0]  # accepted, by Outcome
        self.invalid = 0  # of the failed: rows that could not be used
        self.attempts = self.retried = self.worker_lost = self.stale = self.units_in = self.units_out = 0
        self.progress = Progress()
        self.replayed = False  # it had items when this leader took over
        # where its items are; `items.py` alone moves them between the two
        self.flight: dict[int, AttemptBatch] = {}
        self.accepted = Ranges()
        # pending items: in queues, in memory up to `window_end`; the rest is in the ledger
        self.queues: dict[int, dict[str, SpecQueue]] = {}  # by spec, then by the worker that its items shun
        self.window = self.window_bytes = self.window_end = 0
        self.loading = 0  # load id of the LoadPending under way
        self.returned: dict[int, History] = {}  # to be pending again; their payloads are in the ledger
        self.loading_returned: dict[int, History] = {}
        self.loaded_ahead: set[int] = set()  # seqs at or after `window_end` that were loaded out of turn
        self.chains: dict[str, Chain] = {}
        # what commit-time policies ask for
        self.outcomes: dict[int, tuple[int, int]] = {}  # seq -> (outcome, spec), only where a policy will ask
        self.groups: dict[str, int] = {}  # group -> seq that won it
        self.members: dict[str, set[int]] = {}  # group -> seqs of it that were given out and are not committed
        self.appending = False  # payloads to append copies of are on their way
        # children
        self.children: dict[int, Log] = {}  # by parent seq
        self.reader: Reader | None = None
        # submission
        self.checking = 0  # LoadIds under way
        self.held: deque[SubmitItems | SubmitSeal | WorkerSpawn] = deque()  # until these are answered

    def move(self, cause: str) -> None:
        """Change the log's state; the only way to do so."""
        self.state = LOG.move(self.state, cause)
        self.closed = self.state is LogState.CLOSED
        self.rereading = self.state is LogState.REREADING

    @property
    def rest(self) -> RestState:
        """State of the rest of a root log; its row has the reason."""
        return RestState.SKIPPED if self.progress.rest.why else RestState.TAKEN

    @property
    def pending(self) -> int:
        return self.submitted - sum(self.counts) - len(self.flight)

    def all_queues(self) -> Iterator[SpecQueue]:
        for of_spec in self.queues.values():
            yield from of_spec.values()

    def row(self) -> LogRow:
        parent = self.parent or (0, 0)
        _, done, failed, cancelled, skipped = self.counts
        return LogRow(
            self.id, self.run.id, parent[0], parent[1], self.submitted, self.sealed, self.cursor, done, failed,
            cancelled, skipped, self.attempts, self.retried, self.worker_lost, self.stale, self.units_in,
            self.units_out, self.progress.to_json(), self.invalid,
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class Reader:
    """A parent's attempt that reads its children's results."""

    session: str
    attempt: int
    next: int  # the first child it was not sent
    loading: bool = False
    resume: bool = False  # has something to read, waits for its caps
    complete_sent: bool = False


Entry = tuple[int, int, int, int, SpecQueue]
"""A queue in the order of `index.entry_of`."""
Gate = LaneState | Chain | Log | int
"""What a queue waits for: the lane's cap, the chain, the log's commit horizon, or a time (Unix milliseconds)."""


@dataclass(slots=True, eq=False)
class Homes:
    """Ready queues by the worker that has their prefix, and by the cost of their items."""

    heaps: dict[str, dict[int, list[Entry]]] = field(default_factory=_dict)  # "": nobody has it
    costs: set[int] = field(default_factory=_set)
    last: dict[str, SpecQueue] = field(default_factory=_dict)  # worker -> what it was given last


@dataclass(slots=True, eq=False)
class Index:
    """Queues of a run with pending items. Only `index.py` changes it."""

    ready: dict[Requirements, list[Entry]] = field(default_factory=_dict)
    """Heaps, none of them empty, whose first entry is exact."""
    homes: dict[Requirements, Homes] = field(default_factory=_dict)  # where items differ in cost or affinity
    waiting: dict[Gate, list[SpecQueue]] = field(default_factory=_dict)


@dataclass(slots=True, eq=False)
class Run:
    spec: RunSpec
    phase: RunPhase
    created_ms: int
    id: str = field(init=False)
    state: RunState = field(init=False)  # by `phase`
    reason: str = ""
    causes: list[CauseView] = field(default_factory=_list)  # with which it ended
    failures: Reasons = field(default_factory=Reasons)  # of items that failed for good
    last_failure: tuple[int, str] = (-1, "")  # seq of the last of them, and why
    ended_by: str = ""
    updated_ms: int = field(init=False)
    ended_ms: int = 0
    pausing_until_ms: int = 0
    survivors: tuple[tuple[int, int, int, str], ...] = ()
    priority: int = field(init=False)
    weight: float = 1.0  # its share of the workers
    root: Log = field(init=False)
    logs: dict[int, Log] = field(default_factory=_dict)
    specs: list[SpecInfo] = field(default_factory=_list)
    by_spec: dict[ItemSpec, SpecInfo] = field(default_factory=_dict)
    by_group: dict[str, list[SpecInfo]] = field(default_factory=_dict)
    requirements: dict[tuple[Any, ...], Requirements] = field(default_factory=_dict)
    index: Index = field(default_factory=Index)
    lanes: dict[str, LaneState] = field(default_factory=_dict)
    in_flight: int = 0  # without those that wait for children
    running: int = 0
    waiting: int = 0
    window: int = 0  # of all its logs
    policies: list[Any] = field(default_factory=_list)
    limits: Limits | None = None  # of the policy `skip_rest`
    busy_at: float = 0.0  # when somebody last looked whether it is worked at (monotonic)
    busy_count: int = 0  # its results then
    looked_at: float = 0.0  # up to then its running time is counted (monotonic); only where that is limited
    tracked: bool = False  # outcomes are kept until the cursor passes them
    warm: dict[str, str] = field(default_factory=_dict)  # affinity key -> worker that last got it
    failures_told: set[tuple[str, str]] = field(default_factory=_set)  # causes of which an event was made
    failures_untold: int = 0  # rows that failed besides
    left_at: dict[str, float] = field(default_factory=_dict)
    """Time (monotonic) when a worker last ended all that it held of this run, by worker."""
    progress_note: ProgressNote | None = None  # what an attempt said last
    endless_notes: dict[int, ProgressNote] = field(default_factory=_dict)
    """Notes, by seq, of attempts that last until the run ends."""
    holder: Worker | None = None  # the worker that was given items of it last
    samples: deque[tuple[float, int, int]] = field(default_factory=deque[tuple[float, int, int]])
    """Samples of `rates`: (monotonic, final items, units out)."""

    def __post_init__(self) -> None:
        self.id, self.priority, self.updated_ms = self.spec.run_id, self.spec.priority, self.created_ms
        self.state = self.phase.state

    def row(self) -> RunRow:
        return RunRow(
            self.spec, self.state, self.reason, self.root.id, self.created_ms, self.updated_ms, self.ended_ms,
            self.pausing_until_ms, self.survivors, self.priority, self.ended_by,
        )  # fmt: skip

    def move(self, cause: str) -> None:
        """Change the run's state; the only way to do so. Raises StateError if the table does not list the change."""
        self.phase = RUN.move(self.phase, cause)
        self.state = self.phase.state
        if self.phase is not RunPhase.PAUSING:
            self.pausing_until_ms = 0


@dataclass(frozen=True, slots=True)
class ProgressNote:
    """Progress of an attempt, shown while it is in flight."""

    batch: AttemptBatch
    seq: int
    note: str
    figures: bytes


# ---- attempts and workers


class Assignment:
    """One assignment row: what a worker got in one frame."""

    __slots__ = ("id", "open")

    def __init__(self, number: int) -> None:
        self.id, self.open = number, 0


class AttemptBatch:
    """Attempts with equal number, history, log and spec that a worker got in one frame."""

    __slots__ = (
        "assigned_at", "assignment", "attempt", "failed_by", "failed_on", "failures", "id", "info", "item_bytes",
        "log", "losses", "maybe_started", "notes", "open", "predecessor", "seqs", "started", "started_at", "timeout_ms",
        "waiting", "worker",
    )  # fmt: skip

    def __init__(
        self, number: int, log: Log, info: SpecInfo, worker: Worker, assignment: Assignment, before: History,
        seqs: list[int], at: float,
    ) -> None:  # fmt: skip
        self.id, self.log, self.info, self.worker, self.assignment = number, log, info, worker, assignment
        self.attempt, self.failures, self.losses = before.attempts + 1, before.failures, before.losses
        self.failed_on, self.failed_by, self.seqs, self.assigned_at = before.failed_on, before.failed_by, seqs, at
        self.open = len(seqs)
        self.timeout_ms = info.spec.timeout_ms  # that its worker enforces; the spec's may have changed since
        self.item_bytes = 0  # inline bytes per item
        self.started: dict[int, int] = {}  # seq -> since when, Unix milliseconds
        self.started_at: dict[int, float] = {}  # only where the spec has a timeout
        self.waiting: set[int] = set()  # parents that wait for their children
        self.notes: dict[int, str] = {}  # seq -> what it said last of how far it is
        self.predecessor: tuple[int, int] | None = None  # pipelined: (seq, attempt) it stands on
        self.maybe_started = False  # known from the ledger only: it may have started


@dataclass(slots=True, eq=False)
class StartFailure:
    """Reason why a worker cannot start an executor for a run. `limits` is that of `events.CannotStart`."""

    run_id: str
    executor: str
    limits: tuple[int, int] | None
    code: str
    message: str
    times: int
    final: bool
    first_ms: int
    last_ms: int
    until: float  # monotonic: it is given nothing that needs it before

    @property
    def about(self) -> tuple[str, str, tuple[int, int] | None]:
        return self.run_id, self.executor, self.limits

    def concerns(self, requirements: Requirements) -> bool:
        return (self.run_id, self.executor) == (requirements.run_id, requirements.executor) and (
            self.limits is None or self.limits == requirements.limits
        )


@dataclass(slots=True, eq=False)
class Revoke:
    """Items requested back from a worker for another that is idle."""

    id: int
    thief: str
    keys: list[Keys]


class Worker:
    __slots__ = (
        "address", "batches", "by_run", "bytes", "capacity", "causes", "cpu_percent", "credit", "credit_runs", "done",
        "drain_argument", "due_at", "ended_ms", "failure_emitted", "fenced", "fits", "given_back", "holds", "host_id",
        "id", "in_flight", "incoming", "inventory", "kind", "load", "memory_mib", "preempted", "reason",
        "registered_ms", "replaced", "revoke", "running", "session", "state", "used", "waiting",
    )  # fmt: skip

    def __init__(self, incarnation: str, host_id: str, inventory: Inventory, state: WorkerState, now: Now) -> None:
        self.id, self.host_id, self.state = incarnation, host_id, state
        self.session = ""
        self.address = ""  # from where it connected; for people
        self.replaced = False  # it was lost, and another of its machine came since
        self.credit = Credit()
        self.credit_runs: dict[str, int] = {}
        self.due_at = now.mono
        self.registered_ms = now.wall_ms
        self.ended_ms = 0
        self.reason = ""
        self.drain_argument = ""
        self.load = self.cpu_percent = 0.0
        self.memory_mib = 0
        self.done = self.in_flight = self.running = self.waiting = self.bytes = 0  # in_flight with `waiting`
        self.incoming = 0  # stolen for it and on the way
        self.by_run: dict[str, int] = {}
        self.holds: dict[str, int] = {}  # by run, without `waiting`, as `bytes` is: what counts against its credit
        self.used: dict[str, float] = {}
        self.batches: dict[int, AttemptBatch] = {}
        self.revoke: Revoke | None = None
        self.causes: list[StartFailure] = []  # what it cannot start
        self.given_back: dict[Requirements, float] = {}  # what it gets none of until then: see results.released
        self.fenced = False
        self.preempted = False  # its machine is being taken away: what goes wrong there is nobody's fault
        self.failure_emitted = False
        self.set_inventory(inventory)

    def row(self) -> WorkerRow:
        return WorkerRow(
            self.id, self.host_id, self.inventory, self.state, self.registered_ms, self.ended_ms, self.reason
        )

    def set_inventory(self, inventory: Inventory) -> None:
        self.inventory = inventory
        # Whom the same fits; a string knows its hash.
        self.kind = repr(replace(inventory, host="", version="", pid=0, devices=()))
        self.capacity = dict(inventory.capacity)
        self.fits: dict[tuple[Any, ...], bool] = {}  # by Requirements.key


# ---- the step under construction


class Effects:
    """Effects of this step that modules further up must act on. The module that causes an effect only records it;
    `core.py` alone takes effects off and passes each kind to its module, in one fixed order. So calls go down only."""

    __slots__ = (
        "accepted", "causes", "children", "dispatch", "freed", "idle", "lanes", "left", "limited", "logs", "over",
        "redeliver", "runs", "unblocked", "window",
    )  # fmt: skip

    def __init__(self) -> None:
        self.redeliver: list[Event] = []  # the ledger told what these waited for
        self.unblocked: list[Log] = []  # submissions to them need not wait any more
        self.accepted: dict[int, Log] = {}  # have new results: the cursor may move
        self.limited: dict[str, Run] = {}  # may have reached a limit of theirs
        self.children: dict[int, Log] = {}  # child logs with something for the parent that reads them
        self.freed: dict[str, Worker] = {}  # may be given more
        self.left: dict[str, Worker] = {}  # get nothing more
        self.dispatch = False  # items are pending, or something that held them back moved
        self.causes = False  # a worker told what it cannot start
        self.window: dict[int, Log] = {}  # have room, or rows that are in the ledger only
        self.idle: dict[str, Run] = {}  # the last attempt in flight ended
        self.over: list[Log] = []  # children of parents that have a result
        self.logs: dict[int, Log] = {}  # rows that changed
        self.runs: dict[str, Run] = {}
        self.lanes: dict[tuple[str, str], LaneState] = {}

    def clear(self) -> None:
        """Clear the effects once all were passed up."""
        self.dispatch = self.causes = False
        for effects in (self.accepted, self.limited, self.children, self.freed, self.left, self.window, self.idle):
            effects.clear()
        self.over.clear()
        for rows in (self.logs, self.runs, self.lanes):
            rows.clear()

    def capacity_freed(self, worker: Worker) -> None:
        self.dispatch = True
        if worker.session:  # else it is gone, or will say Hello
            self.freed[worker.id] = worker

    def worker_left(self, worker: Worker) -> None:
        self.freed.pop(worker.id, None)
        self.left[worker.id] = worker


class PendingLoad(NamedTuple):
    """Purpose of an answer from the ledger."""

    log: int
    answered: Callable[[Any], None]
    always: bool  # also if the log was forgotten meanwhile


@dataclass(slots=True, eq=False)
class State:
    """All of the core's memory."""

    settings: CoreSettings
    now: Now = _BEFORE
    step: Step = field(default_factory=Step)
    effects: Effects = field(default_factory=Effects)
    wake: float | None = None
    last_mono: float | None = None  # of the step before
    totals: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("accepted", "stale", "retried", "worker_lost", "stolen", "assigned"), 0)
    )

    runs: dict[str, Run] = field(default_factory=_dict)
    logs: dict[int, Log] = field(default_factory=_dict)
    workers: dict[str, Worker] = field(default_factory=_dict)
    sessions: dict[str, Worker] = field(default_factory=_dict)
    questions: dict[int, PendingLoad] = field(default_factory=_dict)  # by load id
    next_log: int = 1
    next_batch: int = 1
    numbers: Iterator[int] = field(default_factory=lambda: count(1))  # of attempt batches and of entries in heaps
    next_load: int = 1
    next_revoke: int = 1

    # of queues
    timers: list[tuple[int, int, int, SpecQueue]] = field(default_factory=_list)
    """(wall ms, number, log, queue of items with a `not_before`)"""
    retries: list[tuple[float, int, int, tuple[int, History]]] = field(default_factory=_list)
    """(monotonic, number, log, (seq, history))"""
    # of attempts
    timed: dict[int, AttemptBatch] = field(default_factory=_dict)  # with a timeout
    # of dispatch
    ready: dict[str, Worker] = field(default_factory=_dict)  # may be given more
    parked: dict[str, Worker] = field(default_factory=_dict)  # may be given more, but not of these:
    rested_for: Set[Requirements] = frozenset()
    defer_until: float = NEVER
    """Monotonic time until which a chain waits for the worker that had its last item, or a retry for another worker."""
    # of child_items
    reading: dict[int, Log] = field(default_factory=_dict)  # child logs of which a reader may have something to read
    # of runs
    ended: dict[str, float] = field(default_factory=_dict)
    """Time since which a run is needed only by late callers, by run id; oldest first."""
    # of replay
    opening: dict[str, list[Event]] = field(default_factory=_dict)  # run id -> what waits for the ledger to tell of it
    opened: set[str] = field(default_factory=_set)  # asked for and answered, in this step
    rereads: list[Log] = field(default_factory=_list)  # logs whose accepted outcomes have to be read again
    # of workers
    next_scan: float = 0.0

    def wake_by(self, mono: float) -> None:
        if self.wake is None or mono < self.wake:
            self.wake = mono

    def ask(
        self, log: Log, make: Callable[[int], Load], answered: Callable[[Any], None], *, always: bool = False
    ) -> int:
        """Read from the ledger with the next step; `answered` is called with the event that brings the answer."""
        load, self.next_load = self.next_load, self.next_load + 1
        self.questions[load] = PendingLoad(log.id, answered, always)
        self.step.loads.append(make(load))
        return load


def reply(state: State, request: int, value: object = None, error: RolloutError | None = None) -> None:
    state.step.sends.append(Reply(request, value, error))


def touch(state: State, log: Log) -> None:
    """Record that the log's row changed and is written at the end of the step."""
    state.effects.logs[log.id] = log


def touch_run(state: State, run: Run) -> None:
    run.updated_ms = state.now.wall_ms
    state.effects.runs[run.id] = run
