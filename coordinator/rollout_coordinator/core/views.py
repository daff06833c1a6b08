"""Views of runs and workers by the core and the ledger, which the service turns into messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout.model.run import RunSpec, RunState
from rollout.model.worker import Inventory, WorkerState


@dataclass(slots=True)
class LaneView:
    name: str
    max_in_flight: int
    in_flight: int
    done: int
    failed: int
    consecutive_failures: int
    pruned_at: int  # -1: not pruned


@dataclass(slots=True)
class WaitView:
    """Pending items of a run that wait for the same thing."""

    reason: str  # stable: executor | requirements | resources | credit | caps | chain | not_before | no_workers
    message: str  # for people
    items: int  # of those in memory
    impossible: bool  # no worker that is connected could ever take them


@dataclass(slots=True)
class CauseView:
    """Reason why workers cannot start what a run needs, the same on all of `workers`."""

    run_id: str
    executor: str
    code: str
    message: str
    workers: list[str]
    hosts: list[str]
    times: int  # of all of them together
    first_ms: int
    last_ms: int
    everywhere: bool  # no connected worker that could host it is without such a cause


@dataclass(slots=True)
class RunView:
    spec: RunSpec
    state: RunState
    reason: str
    root_log: int
    priority: int
    submitted: int
    sealed: bool
    cursor: int
    done: int
    failed: int
    cancelled: int
    skipped: int
    in_flight: int
    running: int
    attempts: int
    retried: int
    worker_lost: int
    stale: int
    units_in: int
    units_out: int
    created_ms: int
    updated_ms: int
    ended_ms: int
    pausing: bool = False
    workers: int = 0
    survivors: tuple[tuple[int, int, int, str], ...] = ()
    lanes: list[LaneView] = field(default_factory=list[LaneView])
    rate: float = 0.0  # items with a result a second, over the last half minute
    units_rate: float = 0.0  # units out
    note: str = ""  # what an attempt in flight said last of how far it is
    figures: bytes = b""
    figures_of_each: list[bytes] = field(default_factory=list[bytes])  # of attempts that go on until the run ends
    skips_rest: bool = False  # what has not begun is skipped, for `reason`
    causes: list[CauseView] = field(default_factory=list[CauseView])  # of a live run
    waits: list[WaitView] = field(default_factory=list[WaitView])  # of a running run
    ended_by: str = ""  # who ended it by a command
    invalid: int = 0  # of the failed: rows that could not be used
    busy_ms: int = 0  # in which workers had some of it


@dataclass(slots=True)
class RunWorkerView:
    """A worker with its items of one run."""

    incarnation: str
    host: str
    in_flight: int
    running: int


@dataclass(slots=True)
class HeldView:
    """An attempt in flight. `place` is the seq in the root log, then the ordinal of the child, and so on. `began_ms` is
    its start in Unix milliseconds, 0 while it waits at its worker. `note` is its last progress."""

    run_id: str
    place: tuple[int, ...]
    attempt: int
    worker: str
    began_ms: int
    note: str = ""


@dataclass(slots=True)
class WorkerRunView:
    """A run with its items on one worker."""

    run_id: str
    name: str
    workload: str
    in_flight: int
    running: int


@dataclass(slots=True)
class WorkerDetail:
    """Work of a worker by run, and some of its attempts, running ones first."""

    runs: list[WorkerRunView]
    held: list[HeldView]
    used: dict[str, float]  # of its capacity


@dataclass(slots=True)
class WorkerView:
    incarnation: str
    host_id: str
    inventory: Inventory
    state: WorkerState
    in_flight: int
    running: int
    registered_ms: int
    last_seen: float  # seconds ago
    reason: str
    load: float
    done: int
    causes: list[CauseView] = field(default_factory=list[CauseView])  # what it cannot start
    cpu_percent: float = 0.0
    memory_mib: int = 0
