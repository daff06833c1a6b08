"""What the core and the ledger tell of runs and workers; the service turns these into wire messages."""

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
    """Pending items of a run that wait for one and the same thing."""

    reason: str  # stable: executor | requirements | resources | credit | caps | chain | not_before | no_workers
    message: str  # for people
    items: int  # of those in memory
    impossible: bool  # no worker that is connected could ever take them


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
    waits: list[WaitView] = field(default_factory=list[WaitView])  # of a running run


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
