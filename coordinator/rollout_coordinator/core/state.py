"""What the core remembers. Plain mutable records; the modules beside this one change them.

Memory grows with what is in flight and in the window, not with the size of a run: accepted results are ranges, items
in flight share one `AttemptBatch` per (frame, log, spec), and pending items sit in columnar chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Set
from dataclasses import replace
from typing import Any, NamedTuple

from rollout.model.item import Blob, ItemSpec, Key, Outcome
from rollout.model.run import Order, RunSpec, RunState
from rollout.model.worker import Credit, Inventory, WorkerState

from rollout_coordinator.core.events import Keys, Now, ResultsLoaded, SubmitItems, SubmitSeal, WorkerSpawn
from rollout_coordinator.core.ranges import Ranges
from rollout_coordinator.core.settings import CoreSettings
from rollout_coordinator.core.step import LaneRow, LogRow, Snapshot, Step

ROOT_RANK = 1 << 62  # children before the root log: a parent that waits for them holds work open


class History(NamedTuple):
    """What is known of an item's earlier attempts."""

    attempts: int = 0  # highest attempt number so far
    failures: int = 0
    losses: int = 0
    not_before: float = 0.0  # monotonic, unlike the row's: a wall clock that jumps delays no retry
    to: str = ""  # incarnation that asked for it by stealing


FRESH = History()


class Chunk:
    """Pending items of one spec that were never tried, columnar; `pos` is the first not taken."""

    __slots__ = ("ids", "payloads", "pos", "seqs")

    def __init__(self, seqs: list[int], ids: list[bytes], payloads: list[Blob]) -> None:
        self.seqs, self.ids, self.payloads, self.pos = seqs, ids, payloads, 0


class Requirements:
    """What a worker must have: checked once per worker for all specs of a run that ask the same."""

    __slots__ = ("executor", "heap", "key", "labels", "locality", "needs", "plugin", "roles", "slots", "strict")

    def __init__(self, spec: ItemSpec, workload: str) -> None:
        self.executor = spec.executor or workload
        # Its worth, not its identity: the address of a run that is forgotten may be that of a later one's.
        self.key = (self.executor, spec.require_roles, spec.require_labels, spec.require_plugin, spec.resources)
        self.roles = frozenset(spec.require_roles)
        self.labels = spec.require_labels
        self.plugin = spec.require_plugin
        self.slots = dict(spec.resources).get("slots", 0.0)
        self.strict = tuple((name, amount) for name, amount in spec.resources if name != "slots" and amount > 0)
        self.heap: list[tuple[int, int, int, int, SpecQueue]] = []
        self.locality: Locality | None = None  # until its items differ


Entry = tuple[int, int, "SpecQueue"]
"""Head, number of the entry, queue."""


class Locality:
    """Queues by where they should be served and what their items cost. Entries may be out of date: a queue's `place`
    says where it is now."""

    __slots__ = ("costs", "entries", "homes", "last")

    def __init__(self) -> None:
        self.homes: dict[str, dict[int, list[Entry]]] = {}  # "": nobody's yet
        self.costs: set[int] = set()
        self.entries = 0
        self.last: dict[str, SpecQueue] = {}  # worker -> what it was given last


class SpecInfo:
    """A spec of a run, with what dispatch needs resolved."""

    __slots__ = ("index", "lane", "requirements", "spec")

    def __init__(self, index: int, spec: ItemSpec, lane: LaneState, requirements: Requirements) -> None:
        self.index, self.spec, self.lane, self.requirements = index, spec, lane, requirements


class SpecQueue:
    """Pending items of one log and spec that are in memory."""

    __slots__ = ("chain", "chunks", "info", "log", "place", "queued", "retry", "size")

    def __init__(self, log: Log, info: SpecInfo, chain: Chain | None) -> None:
        self.log, self.info, self.chain = log, info, chain
        self.chunks: deque[Chunk] = deque()
        self.retry: list[tuple[int, bytes, Blob, History]] = []  # heap by seq: items tried before
        self.size = 0
        self.queued = False  # in a heap, or blocked at whatever blocks it
        self.place: str | None = None  # where its requirements's locality have it

    def __lt__(self, other: SpecQueue) -> bool:
        return False  # keys in a heap are equal where an empty queue from before a kill meets its successor

    def head(self) -> int:
        head = self.chunks[0].seqs[self.chunks[0].pos] if self.chunks else ROOT_RANK
        return min(head, self.retry[0][0]) if self.retry else head


class LaneState:
    __slots__ = ("blocked", "cap", "consecutive", "done", "failed", "in_flight", "name", "pruned_at", "touched")

    def __init__(self, name: str, cap: int) -> None:
        self.name, self.cap = name, cap
        self.in_flight = self.done = self.failed = self.consecutive = 0
        self.pruned_at = -1
        self.blocked: list[SpecQueue] = []
        self.touched = False  # has a row

    def row(self, run_id: str) -> LaneRow:
        return LaneRow(run_id, self.name, self.done, self.failed, self.consecutive, self.pruned_at)


class Chain:
    """Items of one log that run one at a time, in order."""

    __slots__ = ("blocked", "flying", "free_at", "known", "last_done", "last_worker", "members", "name", "waiting")

    def __init__(self, name: str, known: bool) -> None:
        self.name = name
        self.members: list[int] = []  # heap of seqs in memory or in flight, not accepted
        self.flying: dict[int, AttemptBatch] = {}
        self.last_worker = ""
        self.free_at = 0.0
        self.last_done: tuple[int, int, Blob] | None = None  # (seq, attempt, data) of the last item that is done
        self.known = known  # False after a replay, until the tail was looked up
        self.waiting = False
        self.blocked: list[SpecQueue] = []


class Log:
    __slots__ = (
        "accepted",
        "appending",
        "attempts",
        "blocked",
        "by_arrival",
        "chains",
        "checking",
        "children",
        "closed",
        "counts",
        "cursor",
        "extra",
        "flight",
        "groups",
        "held",
        "id",
        "loaded_ahead",
        "loading",
        "loading_returned",
        "members",
        "outcomes",
        "parent",
        "queues",
        "rank",
        "reader",
        "rereading",
        "retried",
        "returned",
        "run",
        "sealed",
        "stale",
        "submitted",
        "units_in",
        "units_out",
        "window",
        "window_bytes",
        "window_end",
        "worker_lost",
    )  # fmt: skip

    def __init__(self, log: int, run: Run, parent: Key | None) -> None:
        self.id, self.run, self.parent = log, run, parent
        self.rank = log if parent else ROOT_RANK
        self.by_arrival = parent is None and run.spec.order is Order.ARRIVAL  # children are read by ordinal
        self.submitted = self.cursor = self.window_end = 0
        self.sealed = False
        self.counts = [0, 0, 0, 0, 0]  # accepted, by Outcome
        self.attempts = self.retried = self.worker_lost = self.stale = self.units_in = self.units_out = 0
        self.extra: dict[str, Any] = {}
        self.accepted = Ranges()
        self.outcomes: dict[int, tuple[int, int]] = {}  # seq -> (outcome, spec), only where a policy will ask
        self.appending = False  # payloads to append copies of are on their way
        self.rereading = False  # outcomes of accepted results are on their way from the ledger
        self.flight: dict[int, AttemptBatch] = {}
        self.queues: dict[int, SpecQueue] = {}
        self.chains: dict[str, Chain] = {}
        self.groups: dict[str, int] = {}  # group -> seq that won it
        self.members: dict[str, set[int]] = {}  # group -> seqs of it that were given out and are not committed
        self.window = self.window_bytes = 0
        self.loading = 0  # load id of the LoadPending under way
        self.returned: dict[int, History] = {}  # to be pending again; their payloads are on disk
        self.loading_returned: dict[int, History] = {}
        self.loaded_ahead: set[int] = set()  # seqs at or after `window_end` that were loaded out of fair
        self.blocked: list[SpecQueue] = []  # past the commit horizon
        self.children: dict[int, Log] = {}  # by parent seq
        self.reader: Reader | None = None
        self.checking = 0  # LoadIds under way
        self.held: deque[SubmitItems | SubmitSeal | WorkerSpawn] = deque()
        self.closed = False  # nothing of it will run any more

    @property
    def pending(self) -> int:
        return self.submitted - sum(self.counts) - len(self.flight)

    def row(self, extra: str) -> LogRow:
        parent = self.parent or (0, 0)
        _, done, failed, cancelled, skipped = self.counts
        return LogRow(
            self.id, self.run.id, parent[0], parent[1], self.submitted, self.sealed, self.cursor, done, failed,
            cancelled, skipped, self.attempts, self.retried, self.worker_lost, self.stale, self.units_in,
            self.units_out, extra,
        )  # fmt: skip


class Reader:
    """A parent's attempt that reads its children's results."""

    __slots__ = ("attempt", "complete_sent", "loading", "next", "resume", "session")

    def __init__(self, session: str, attempt: int, next_child: int) -> None:
        self.session, self.attempt, self.next = session, attempt, next_child
        self.loading = False
        self.resume = False  # has something to read, waits for its caps
        self.complete_sent = False


class Run:
    __slots__ = (
        "by_group",
        "by_spec",
        "created_ms",
        "ended_ms",
        "id",
        "in_flight",
        "lanes",
        "logs",
        "pausing_until_ms",
        "policies",
        "priority",
        "reason",
        "requirements",
        "root",
        "running",
        "spec",
        "specs",
        "state",
        "stop_submitting",
        "survivors",
        "tracked",
        "updated_ms",
        "waiting",
        "warm",
        "weight",
        "window",
    )  # fmt: skip

    def __init__(self, spec: RunSpec, state: RunState, created_ms: int) -> None:
        self.id, self.spec, self.state = spec.run_id, spec, state
        self.reason = ""
        self.created_ms = self.updated_ms = created_ms
        self.ended_ms = self.pausing_until_ms = 0
        self.stop_submitting = False
        self.survivors: tuple[tuple[int, int, int, str], ...] = ()
        self.priority = spec.priority
        self.weight = 1.0
        self.root: Log
        self.logs: dict[int, Log] = {}
        self.specs: list[SpecInfo] = []
        self.by_spec: dict[ItemSpec, SpecInfo] = {}
        self.by_group: dict[str, list[SpecInfo]] = {}
        self.requirements: dict[tuple[Any, ...], Requirements] = {}
        self.lanes: dict[str, LaneState] = {}
        self.in_flight = self.running = self.waiting = 0  # in_flight without those that wait for children
        self.window = 0  # of all its logs
        self.policies: list[Any] = []
        self.tracked = False  # outcomes are kept until the cursor passes them
        self.warm: dict[str, str] = {}  # affinity key -> worker that last got it


class Assignment:
    """One assignment row."""

    __slots__ = ("id", "open")

    def __init__(self, number: int) -> None:
        self.id, self.open = number, 0


class AttemptBatch:
    """Attempts with equal number, history, log and spec that a worker got in one frame."""

    __slots__ = (
        "assigned_at", "assignment", "attempt", "failures", "id", "info", "item_bytes", "log", "losses",
        "maybe_started", "open", "predecessor", "seqs", "started", "started_at", "waiting", "worker",
    )  # fmt: skip

    def __init__(
        self, number: int, log: Log, info: SpecInfo, worker: Worker, assignment: Assignment, attempt: int,
        failures: int, losses: int, seqs: list[int], at: float,
    ) -> None:  # fmt: skip
        self.id, self.log, self.info, self.worker, self.assignment = number, log, info, worker, assignment
        self.attempt, self.failures, self.losses, self.seqs, self.assigned_at = attempt, failures, losses, seqs, at
        self.open = len(seqs)
        self.item_bytes = 0  # inline bytes per item
        self.started: set[int] = set()
        self.started_at: dict[int, float] = {}  # only where the spec has a timeout
        self.waiting: set[int] = set()
        self.predecessor: tuple[int, int] | None = None  # pipelined: (seq, attempt) it stands on
        self.maybe_started = False  # known from the ledger only: it may have started


class Revoke:
    __slots__ = ("id", "keys", "thief")

    def __init__(self, revoke: int, thief: str, keys: list[Keys]) -> None:
        self.id, self.thief, self.keys = revoke, thief, keys


class Worker:
    __slots__ = (
        "batches",
        "by_run",
        "bytes",
        "capacity",
        "credit",
        "credit_runs",
        "done",
        "drain_argument",
        "due_at",
        "ended_ms",
        "failure_emitted",
        "fenced",
        "fits",
        "holds",
        "host_id",
        "id",
        "in_flight",
        "incoming",
        "inventory",
        "kind",
        "load",
        "reason",
        "registered_ms",
        "revoke",
        "running",
        "session",
        "state",
        "used",
        "waiting",
    )  # fmt: skip

    def __init__(self, incarnation: str, host_id: str, inventory: Inventory, state: WorkerState, now: Now) -> None:
        self.id, self.host_id, self.state = incarnation, host_id, state
        self.session = ""
        self.credit = Credit()
        self.credit_runs: dict[str, int] = {}
        self.due_at = now.mono
        self.registered_ms = now.wall_ms
        self.ended_ms = 0
        self.reason = ""
        self.drain_argument = ""
        self.load = 0.0
        self.done = self.in_flight = self.running = self.waiting = self.bytes = 0  # in_flight with `waiting`
        self.incoming = 0  # stolen for it and on the way
        self.by_run: dict[str, int] = {}
        self.holds: dict[str, int] = {}  # by run, without `waiting`, as `bytes` is: what counts against its credit
        self.used: dict[str, float] = {}
        self.batches: dict[int, AttemptBatch] = {}
        self.revoke: Revoke | None = None
        self.fenced = False
        self.failure_emitted = False
        self.set_inventory(inventory)

    def set_inventory(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self.kind = repr(replace(inventory, host="", version=""))  # whom the same fits; a string knows its hash
        self.capacity = dict(inventory.capacity)
        self.fits: dict[tuple[Any, ...], bool] = {}  # by Requirements.key


class LoadNote(NamedTuple):
    """What an answer from the ledger is for."""

    kind: str
    log: int
    call: Callable[..., None]
    submitted: int = 0


class State:
    """All of the core's memory, and the step under construction."""

    __slots__ = (
        "asking",
        "chains_due",
        "dirty",
        "dirty_lanes",
        "dirty_logs",
        "dirty_runs",
        "ended",
        "last_mono",
        "loads",
        "logs",
        "moved",
        "next_batch",
        "next_load",
        "next_log",
        "next_number",
        "next_revoke",
        "next_scan",
        "now",
        "opening",
        "over",
        "reading",
        "recalled",
        "rereads",
        "rested_for",
        "resting",
        "retries",
        "runs",
        "sessions",
        "settings",
        "steal_due",
        "step",
        "timed",
        "timers",
        "totals",
        "wake",
        "window_dirty",
        "workers",
    )  # fmt: skip

    def __init__(self, settings: CoreSettings) -> None:
        self.settings = settings
        self.now = Now(0.0, 0)
        self.step = Step()
        self.runs: dict[str, Run] = {}
        self.logs: dict[int, Log] = {}
        self.workers: dict[str, Worker] = {}
        self.sessions: dict[str, Worker] = {}
        self.asking: dict[str, Worker] = {}  # may be given more
        self.resting: dict[str, Worker] = {}  # may be given more, but not of these:
        self.rested_for: Set[Requirements] = frozenset()
        self.loads: dict[int, LoadNote] = {}
        self.opening: dict[str, list[Any]] = {}  # run id -> events that wait for the ledger to tell of it
        self.recalled: set[str] = set()  # asked for and answered, in this very call
        self.ended: dict[str, float] = {}  # run id -> since when it is of use to nobody but late callers; oldest first
        self.over: list[Log] = []  # children of parents with a result: forgotten at the end of the step
        self.next_log = self.next_batch = self.next_number = self.next_load = self.next_revoke = 1
        self.next_scan = 0.0
        self.last_mono: float | None = None
        self.timers: list[tuple[int, int, int, SpecQueue]] = []  # (wall ms, n, log, queue of items with a `not_before`)
        self.retries: list[tuple[float, int, int, tuple[int, History]]] = []  # (monotonic, n, log, (seq, history))
        self.chains_due = float("inf")  # monotonic: until then a chain waits for the worker that had its last item
        self.timed: dict[int, AttemptBatch] = {}
        self.reading: dict[int, Log] = {}  # child logs whose reader may have something to read, or to wait for no more
        self.rereads: list[Log] = []  # logs whose accepted outcomes have to be read again
        self.steal_due = False  # time has passed: an idle worker may find what it did not find before
        self.dirty = False  # dispatch may find something to do
        self.dirty_logs: dict[int, Log] = {}
        self.dirty_runs: dict[str, Run] = {}
        self.dirty_lanes: dict[tuple[str, str], LaneRow] = {}
        self.window_dirty: dict[int, Log] = {}
        self.moved: dict[int, Log] = {}  # logs with new results
        self.wake: float | None = None
        self.totals = {"accepted": 0, "stale": 0, "retried": 0, "worker_lost": 0, "stolen": 0, "assigned": 0}

    def wake_by(self, mono: float) -> None:
        if self.wake is None or mono < self.wake:
            self.wake = mono


def touch(state: State, log: Log) -> None:
    """The log's row changed: write it at the end of the step."""
    state.dirty_logs[log.id] = log


def touch_run(state: State, run: Run) -> None:
    run.updated_ms = state.now.wall_ms
    state.dirty_runs[run.id] = run


__all__ = [
    "FRESH",
    "Assignment",
    "AttemptBatch",
    "Chain",
    "Chunk",
    "History",
    "LaneState",
    "LoadNote",
    "Log",
    "Outcome",
    "Reader",
    "Requirements",
    "ResultsLoaded",
    "Revoke",
    "Run",
    "Snapshot",
    "SpecInfo",
    "SpecQueue",
    "State",
    "Worker",
    "touch",
    "touch_run",
]  # fmt: skip
