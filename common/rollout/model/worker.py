"""What a worker reports about itself."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class WorkerState(StrEnum):
    JOINING = "joining"  # beats arrive, Work is not open yet
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    GONE = "gone"  # deregistered
    QUARANTINED = "quarantined"  # broke the protocol; gets no work


@dataclass(frozen=True, slots=True)
class Inventory:
    """Capacity and abilities. `capacity` has slots, cpus, memory_mib, gpus and anything else the worker declares."""

    capacity: tuple[tuple[str, float], ...] = (("slots", 1.0),)
    roles: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    plugins: tuple[str, ...] = ()
    host: str = ""
    version: str = ""
    executors: tuple[str, ...] = ()
    pid: int = 0
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Credit:
    """How much unfinished work a worker wants at most. It is absolute, so repeating it is harmless."""

    items: int = 0
    bytes: int = 4 << 20
    run_items: tuple[tuple[str, int], ...] = ()  # per run id, replaces `items`
