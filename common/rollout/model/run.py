"""A run: one submission of one workload."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RunState(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"
    COMPLETED = "completed"
    FAILED = "failed"
    KILLED = "killed"
    INTERRUPTED = "interrupted"


ENDED = frozenset({RunState.COMPLETED, RunState.FAILED, RunState.KILLED})


class Order(StrEnum):
    SCHEDULE = "schedule"
    ARRIVAL = "arrival"


@dataclass(frozen=True, slots=True)
class Lane:
    name: str
    max_in_flight: int = 0  # 0: no cap


@dataclass(frozen=True, slots=True)
class Policy:
    """A commit-time policy by name, e.g. prune_lane {after: "3"}; core/policies.py lists them."""

    name: str
    options: tuple[tuple[str, str], ...] = ()


END_ON_FAILURE = Policy("end_run", (("on", "failed"),))
"""A policy that ends the run when an item fails for good, because nothing can come after it."""


@dataclass(frozen=True, slots=True)
class RunSpec:
    """A run as a client submits it. `config` is the resolved configuration as canonical JSON."""

    run_id: str
    workload: str
    config: bytes
    name: str = ""
    order: Order = Order.SCHEDULE
    priority: int = 0
    max_in_flight: int = 0  # 0: no cap
    lanes: tuple[Lane, ...] = ()
    policies: tuple[Policy, ...] = ()
    pause_timeout_ms: int = 60_000
    labels: tuple[tuple[str, str], ...] = ()
    one_worker: bool = False
    """Whether all of its items run on one worker at a time, so that a limit of its process holds across the cluster."""
