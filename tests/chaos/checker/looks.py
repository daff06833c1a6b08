"""What one look at the ledger, and two in a row, must tell while faults strike."""

from __future__ import annotations

from chaos.ledger_reader import Snapshot


def consistent(seen: Snapshot) -> list[str]:
    """Done only when the ledger says so."""
    found = [
        f"log {log} committed {cursor} of {seen.ends[log][0]}"
        for log, cursor in seen.cursors.items()
        if cursor > seen.ends[log][0]
    ]
    for run, state in seen.states.items():
        log = seen.logs[run]
        submitted, sealed = seen.ends[log]
        if state == "completed" and not (sealed and seen.cursors[log] == submitted):
            found.append(f"run {run} is completed with {seen.cursors[log]} of {submitted} committed, sealed: {sealed}")
    return found


def compare(before: Snapshot, after: Snapshot) -> list[str]:
    """Nothing that was final changed between two looks."""
    found: list[str] = []
    if after.epoch < before.epoch:
        found.append(f"the epoch went from {before.epoch} back to {after.epoch}")
    if after.batch < before.batch:
        found.append(f"the batch number went from {before.batch} back to {after.batch}")
    for log, cursor in before.cursors.items():
        if log not in after.cursors:
            found.append(f"log {log} is gone")
            continue
        if after.cursors[log] < cursor:
            found.append(f"the cursor of log {log} went from {cursor} back to {after.cursors[log]}")
        if after.ends[log][0] < before.ends[log][0] or after.ends[log][1] < before.ends[log][1]:
            found.append(f"log {log} had {before.ends[log]} (submitted, sealed), now {after.ends[log]}")
    for run, state in before.states.items():
        if state == "completed" and after.states.get(run) != "completed":
            found.append(f"run {run} was completed and is {after.states.get(run)}")
    return found
