"""Lists runs of private clusters by reading their ledgers' files, without starting a coordinator."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from rollout.client.private import DATABASE, command_of, owner_of, private_runs, states_below
from rollout.wire.v1 import runs_pb2 as pb

_RUNS = """
SELECT run.run_id, run.workload, run.name, run.state, run.reason, run.created_ms, run.updated_ms, run.ended_ms,
       log.submitted, log.sealed, log.cursor, log.done, log.failed, log.cancelled, log.skipped
  FROM run JOIN log ON log.log = run.root_log
"""


@dataclass(frozen=True, slots=True)
class Listed:
    status: pb.RunStatus
    directory: Path
    """Its output directory."""


def every_private_run() -> list[Listed]:
    """Return the runs of this account on this machine, and of the directories here, the newest first."""
    states = dict.fromkeys([run.state for run in private_runs()] + [state.resolve() for state in states_below(Path())])
    found = [Listed(status, state.parent) for state in states for status in _runs(state)]
    return sorted(found, key=lambda one: one.status.created_ms, reverse=True)


def as_it_stands(status: pb.RunStatus, state: Path) -> pb.RunStatus:
    """Return the state of a run whose private cluster is not running: its ledger says running until someone ends it."""
    if status.state == "running":
        command = command_of(state)
        status.state = "interrupted"
        status.reason = "no command works at it" + (f"; it goes on with: {command}" if command else "")
        del status.waits[:]
    return status


def _runs(state: Path) -> Iterable[pb.RunStatus]:
    """Return the runs; empty if the ledger cannot be read, or is of another version."""
    idle = not _is_worked_at(state)
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"{(state / DATABASE).as_uri()}?mode=ro", uri=True)) as db:
        for run_id, workload, name, run_state, reason, created, updated, ended, *counts in db.execute(_RUNS):
            submitted, sealed, cursor, done, failed, cancelled, skipped = counts
            status = pb.RunStatus(
                spec=pb.RunSpec(run_id=run_id, workload=workload, name=name), state=run_state, reason=reason,
                submitted=submitted, sealed=bool(sealed), cursor=cursor, done=done, failed=failed, cancelled=cancelled,
                skipped=skipped, created_ms=created, updated_ms=updated, ended_ms=ended,
            )  # fmt: skip
            yield as_it_stands(status, state) if idle else status


def _is_worked_at(state: Path) -> bool:
    pid = owner_of(state)
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return pid > 0
