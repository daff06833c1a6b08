"""An entry of a run's commit log, as every workload reads it."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.model.item import Failure, Outcome


@dataclass(slots=True)
class CommitEntry:
    """`data` and `payload` are resolved: always bytes, never a reference to an object.

    `attempt` is the number of the assignment that ended it, `tries` how many of these began: what was returned or
    stolen before it began does not count.
    """

    position: int  # in the commit log, from 0
    seq: int
    attempt: int
    outcome: Outcome
    data: bytes
    payload: bytes
    id: bytes
    failure: Failure | None = None
    duration_ms: int = 0
    accepted_ms: int = 0
    worker: str = ""
    units_in: int = 0
    units_out: int = 0
    tries: int = 1
