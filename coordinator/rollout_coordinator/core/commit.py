"""Acceptance, the commit cursor and the ordered commit log.

Schedule order: the cursor moves over the contiguous prefix of accepted results; policies see them there, in order, and
nowhere else. Arrival order: a result is committed as it is accepted and gets its position in the log.
"""

from __future__ import annotations

from rollout.model.item import Blob, Failure, ItemState, Outcome

from rollout_coordinator.core import policies, runs
from rollout_coordinator.core.state import LaneState, Log, Run, SpecInfo, State, touch
from rollout_coordinator.core.step import Emit, ResultRows, RunMoved
from rollout_coordinator.core.transitions import ITEM
from rollout_coordinator.core.window import unblock

_COMMIT = {
    Outcome.DONE: "commit_done",
    Outcome.FAILED: "commit_failed",
    Outcome.CANCELLED: "commit_cancelled",
    Outcome.SKIPPED: "commit_skipped",
}


def touch_lane(state: State, run: Run, lane: LaneState) -> None:
    state.dirty_lanes[(run.id, lane.name)] = lane.row(run.id)


def note_outcome(state: State, log: Log, seq: int, outcome: Outcome, info: SpecInfo) -> None:
    """Kept until the cursor passes it, where somebody will ask."""
    run = log.run
    if run.tracked and log.parent is None:
        log.outcomes[seq] = (int(outcome), info.index)
    elif info.lane.name:
        count_lane(state, run, info.lane, outcome)


def count_lane(state: State, run: Run, lane: LaneState, outcome: Outcome) -> None:
    if outcome is Outcome.DONE:
        lane.done += 1
        lane.consecutive = 0
    elif outcome is Outcome.FAILED:
        lane.failed += 1
        lane.consecutive += 1
    else:
        return
    touch_lane(state, run, lane)


def accept_rows(state: State, log: Log, rows: ResultRows) -> None:
    """These results are durable after this step; the counters, ranges and the cursor follow."""
    counts = log.counts
    if rows.failures or rows.outcome[0] is not Outcome.DONE:
        for outcome in rows.outcome:
            counts[outcome] += 1
    else:
        first = rows.outcome.count(Outcome.DONE)
        counts[Outcome.DONE] += first
        if first != len(rows.outcome):
            for outcome in rows.outcome:
                if outcome is not Outcome.DONE:
                    counts[outcome] += 1
    state.totals["accepted"] += len(rows.seq)
    log.accepted.add_many(rows.seq)
    state.step.writes.results.append(rows)
    touch(state, log)
    state.moved[log.id] = log
    if log.by_arrival:
        n = len(rows.seq)
        rows.position = list(range(log.cursor, log.cursor + n))
        log.cursor += n
        if log.run.tracked and log.parent is None:
            for seq in rows.seq:
                commit_one(state, log, seq)


def close_pending(state: State, log: Log, spec: int, seqs: list[int], outcome: Outcome, failure: Failure) -> None:
    """Items that end without an attempt: a result of attempt 0, so that the cursor can pass."""
    ITEM.move(ItemState.PENDING, "close")
    n, info = len(seqs), log.run.specs[spec]
    data: list[Blob] = [b""] * n
    rows = ResultRows(
        log.id, list(seqs), [0] * n, [outcome] * n, data, dict.fromkeys(range(n), failure), [0] * n, [0] * n, [0] * n,
        "", state.now.wall_ms,
    )  # fmt: skip
    for seq in seqs:
        note_outcome(state, log, seq, outcome, info)
    accept_rows(state, log, rows)


def commit_one(state: State, log: Log, seq: int) -> None:
    """The cursor passes a result that policies, lanes or groups want to know of."""
    known = log.outcomes.pop(seq, None)
    if known is None:
        return
    outcome, info = Outcome(known[0]), log.run.specs[known[1]]
    ITEM.move(ItemState.ACCEPTED, _COMMIT[outcome])
    if info.lane.name:
        count_lane(state, log.run, info.lane, outcome)
    policies.committed(state, log, seq, outcome, info)


def advance(state: State, log: Log) -> None:
    """Move the cursor as far as the accepted prefix goes."""
    before = log.cursor
    if not log.by_arrival:
        if not log.run.tracked or log.parent is not None:
            log.cursor = log.accepted.advance(before)
        elif not log.rereading:
            while log.cursor in log.accepted and log.run.state.value in ("running", "paused", "interrupted"):
                seq = log.cursor
                log.cursor += 1
                commit_one(state, log, seq)
            log.accepted.forget(log.cursor)  # a policy that ended the run stops the cursor short of the others
        moved = log.cursor > before
        if moved and log.blocked:
            unblock(log.blocked)
            state.dirty = True
        if moved and log.reader is not None:
            state.reading[log.id] = log
    if log.cursor > before or log.by_arrival:
        touch(state, log)
        if log.parent is None:
            state.step.sends.append(RunMoved(log.run.id))
            state.step.sends.append(
                Emit("item_committed", "debug", {"run_id": log.run.id, "cursor": log.cursor, "log": log.id})
            )


def finish_if_complete(state: State, run: Run) -> None:
    """Completed = sealed and everything committed. Failed items do not fail the run."""
    root = run.root
    if root.sealed and root.cursor >= root.submitted and not root.rereading and runs.live(run):
        if policies.wants_more(state, run):
            return
        runs.end(state, run, "complete", "")
