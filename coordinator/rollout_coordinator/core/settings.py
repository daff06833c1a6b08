"""Settings of the core, in seconds unless the name says otherwise."""

from __future__ import annotations

from dataclasses import dataclass

QUARANTINED_MAX = 1000
"""Maximum number of quarantined incarnations that are remembered, the newest. A host that may get certificates may get
others. This keeps broken programs out, and revocation hostile ones, so it need not be unlimited."""


@dataclass(frozen=True, slots=True)
class CoreSettings:
    heartbeat_interval: float = 0.5
    coordinator_failure_timeout: float = 5.0
    clock_skew_budget: float = 0.25
    orphan_grace: float = 60.0
    window_items: int = 8192  # pending rows of one log kept in memory
    window_bytes: int = 32 << 20
    window_items_max: int = 65536  # grown to this while lanes or chains block the head of the window
    reorder_items: int = 4096  # how far behind an item another may be that is begun before it for its cost or affinity
    commit_horizon: int = 100_000  # runs with commit-time policies: dispatch at most this far past the cursor
    assign_items_max: int = 256  # per worker and frame
    assign_bytes_max: int = 512 << 10  # inline payload bytes per frame; the wire limit is 1 MiB
    steal_max: int = 32
    waiting_max: int = 1024  # parents of a run that may wait at one worker before it gets no more of the root log
    chain_grace: float = 2.0  # wait this long for the worker that ran a chain's previous item
    another_worker_grace: float = 10.0  # wait this long for a worker other than that on which an attempt failed
    retry_backoff_cap: float = 300.0
    isolate_after_losses: int = 2
    ended_on_disk: bool = False  # the driver answers LoadRun: ended runs need not be kept, those of others are found
    keep_ended: float = 60.0  # an ended run stays in memory this long; only with ended_on_disk
