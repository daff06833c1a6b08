"""Logs: opened for a run or the children of an item, closed when none of their items will run any more, forgotten."""

from __future__ import annotations

from rollout.model.item import AttemptEnd, Key

from rollout_coordinator.core.attempts import cancel, end_attempt, open_seqs
from rollout_coordinator.core.queues import forget_pending
from rollout_coordinator.core.state import Log, Run, State, touch

TALLIES = ("attempts", "retried", "worker_lost", "stale", "units_in", "units_out")


def open_log(state: State, run: Run, parent: Key | None) -> Log:
    """Open a new, empty log."""
    number, state.next_log = state.next_log, state.next_log + 1
    log = make_log(state, run, parent, number)
    touch(state, log)
    return log


def make_log(state: State, run: Run, parent: Key | None, number: int) -> Log:
    log = Log(number, run, parent)
    run.logs[number] = log
    state.logs[number] = log
    if parent is not None:
        state.logs[parent.log].children[parent.seq] = log
    return log


def close_log(state: State, log: Log) -> None:
    """Close a log of which nothing will run any more."""
    log.move("close")
    forget_pending(state, log)
    log.outcomes.clear()
    log.members.clear()
    log.reader = None


def close_children(state: State, child: Log) -> None:
    """Close the children of a parent that has its result."""
    for batch in list(dict.fromkeys(child.flight.values())):
        seqs = open_seqs(batch)
        cancel(state, batch.worker, [(batch, seqs)], "parent ended")
        for seq in seqs:
            if child.flight.get(seq) is batch:
                end_attempt(state, batch, seq, AttemptEnd.DROPPED, "parent_ended", "its parent has a result")
    for grandchild in child.children.values():
        close_children(state, grandchild)
    close_log(state, child)
    fold_counters(state, child)
    state.effects.over.append(child)


def fold_counters(state: State, log: Log) -> None:
    """Move a child log's counters to its run's root, so that the run's do not depend on which logs are in memory."""
    root = log.run.root
    for name in TALLIES:
        setattr(root, name, getattr(root, name) + getattr(log, name))
        setattr(log, name, 0)
    touch(state, root)
    touch(state, log)


def forget_log(state: State, log: Log) -> None:
    """Drop a log from memory; the ledger has all of it."""
    close_log(state, log)
    if log.parent is not None:
        parent = state.logs.get(log.parent.log)
        if parent is not None:
            parent.children.pop(log.parent.seq, None)
    state.logs.pop(log.id, None)
    log.run.logs.pop(log.id, None)


def forget_over(state: State) -> None:
    """Forget logs at the end of a step, when their last rows are among its writes."""
    for log in state.effects.over:
        forget_log(state, log)
