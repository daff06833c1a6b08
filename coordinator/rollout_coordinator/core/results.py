"""Results, starts and returned attempts: what a worker reports about the attempts it holds.

Only the newest session of the worker that holds the attempt counts. A result for an attempt that was taken away is
stale: counted, reported, forgotten. One for an attempt that was never assigned is a protocol fault.
"""

from __future__ import annotations

from rollout.model.errors import ProtocolError
from rollout.model.item import AttemptEnd, Failure, Outcome
from rollout.model.run import ENDED

from rollout_coordinator.core import attempts, chains, commit, failures
from rollout_coordinator.core.events import Keys, ResultGroup, WorkerReleased, WorkerResults, WorkerStarted
from rollout_coordinator.core.state import AttemptBatch, Log, Requirements, State, Worker, touch
from rollout_coordinator.core.step import Evidence, ResultRows, SendAccepted
from rollout_coordinator.core.workers import quarantine, worker_of_session

RELEASE_ENDS = {"pause": AttemptEnd.PAUSED}
GIVEN_BACK_S = 60.0
"""Seconds for which a worker that returned items because parents wait there is assigned none like them, unless one of
its parents ends before. The parents come first meanwhile."""


def started(state: State, event: WorkerStarted) -> None:
    worker = worker_of_session(state, event.session)
    if worker is None:
        return
    for keys in event.keys:
        for batch, seqs in attempts.current_by_batch(state, worker, keys).items():
            attempts.start(state, batch, seqs)


def released(state: State, event: WorkerReleased) -> None:
    worker = worker_of_session(state, event.session)
    if worker is None:
        return
    how = RELEASE_ENDS.get(event.reason, AttemptEnd.RELEASED)
    behind: list[Requirements] = []
    for keys in event.keys:
        for batch, seq in attempts.current(state, worker, keys):
            behind.append(batch.info.requirements)
            if event.reason == "self_fence":
                failures.not_held(state, batch, seq, "self_fence", "its worker was cut off and killed it")
            else:
                attempts.end_attempt(state, batch, seq, how, event.reason or "released", "given back by its worker")
    if event.reason == "parent_waits" and worker.waiting:
        worker.given_back.update(dict.fromkeys(behind, state.now.mono + GIVEN_BACK_S))


def results(state: State, event: WorkerResults) -> None:
    worker = worker_of_session(state, event.session)
    if worker is None:
        return
    accepted: list[Keys] = []
    stale: list[Keys] = []
    for group in event.groups:
        log = state.logs.get(group.log)
        fault = impossible(state, log, group)
        if fault:
            quarantine(state, worker, ProtocolError(fault))
            break
        if log is None:
            stale.append(Keys(group.log, group.seq, group.attempt))
            state.totals["stale"] += len(group.seq)
            continue
        yes, no = take_group(state, worker, log, group)
        if yes.seq:
            accepted.append(yes)
        if no.seq:
            stale.append(no)
            log.stale += len(no.seq)
            state.totals["stale"] += len(no.seq)
            touch(state, log)
    if accepted or stale:
        state.step.sends.append(SendAccepted(event.session, accepted, stale))


def impossible(state: State, log: Log | None, group: ResultGroup) -> str:
    """Return why these attempts can never have been assigned, or an empty string if it is possible. A new leader knows
    no history, so only what is impossible under any history counts."""
    if log is None:
        if group.log >= state.next_log or group.log < 1:
            return f"Result for log {group.log}, which was never opened: it cannot have been assigned."
        return ""
    if group.seq and (max(group.seq) >= log.submitted or min(group.seq) < 0):
        return f"Result for seq {max(group.seq)} of log {log.id}, which has only {log.submitted} items."
    batches = map(log.flight.get, group.seq)
    for seq, attempt, batch in zip(group.seq, group.attempt, batches, strict=True):
        if attempt < 1 or (batch is not None and attempt > batch.attempt):
            return f"Result for attempt {attempt} of seq {seq} in log {log.id}, which was never given to any worker."
    return ""


def take_group(state: State, worker: Worker, log: Log, group: ResultGroup) -> tuple[Keys, Keys]:
    """Accept current results; return (accepted, stale). The common group (one batch, all done) is handled by
    columns."""
    seqs, tries = group.seq, group.attempt
    if log.run.state in ENDED:  # of survivors: they are over
        keys = Keys(log.id, seqs, tries)
        for batch, seq in attempts.current(state, worker, keys):
            attempts.end_attempt(state, batch, seq, AttemptEnd.RELEASED, "run_ended", "its run has ended")
        return Keys(log.id, [], []), keys
    by_batch: dict[AttemptBatch, list[int]] = {}
    stale: list[int] = []
    seen: set[int] = set()
    for i, seq, attempt, batch in zip(range(len(seqs)), seqs, tries, map(log.flight.get, seqs), strict=True):
        if batch is None or batch.worker is not worker or batch.attempt != attempt or seq in seen:
            stale.append(i)
            continue
        seen.add(seq)
        at = by_batch.get(batch)
        if at is None:
            by_batch[batch] = [i]
        else:
            at.append(i)
    plain = not stale and not group.failures and group.outcome is None and not log.run.tracked and not log.children
    if plain and all(not b.info.spec.chain and b.info.lane.pruned_at < 0 for b in by_batch):
        for batch, at in by_batch.items():
            attempts.end(state, batch, seqs if len(at) == len(seqs) else [seqs[i] for i in at], "result")
            if batch.info.lane.name:
                commit.count_lane(state, log.run, batch.info.lane, Outcome.DONE, len(at))
        insert_all(state, worker, log, group)
        return Keys(log.id, seqs, tries), Keys(log.id, [], [])
    return take_singly(state, worker, log, group, stale)


def take_singly(state: State, worker: Worker, log: Log, group: ResultGroup, stale: list[int]) -> tuple[Keys, Keys]:
    """Accept results one at a time, as failures, chains and policies require."""
    stale_at = set(stale)
    yes, no = Keys(log.id, [], []), Keys(log.id, [], [])
    taken: list[int] = []
    outcomes: list[Outcome] = []
    final: dict[int, Failure] = {}
    for i, seq in enumerate(group.seq):
        batch = log.flight.get(seq)
        told = yes
        if i in stale_at or batch is None:
            told = no
        elif batch.predecessor is not None and not chains.predecessor_committed(log, batch):
            code, message = "predecessor_changed", "its input is not final"
            attempts.end_attempt(state, batch, seq, AttemptEnd.DROPPED, code, message)
            told = no
        else:
            outcome, failure = outcome_of(state, batch, seq, group, i)
            if outcome is not None:
                if failure is not None:
                    final[len(taken)] = failure
                taken.append(i)
                outcomes.append(outcome)
                commit.end_in_flight(state, batch, seq, outcome, group.data[i], "result")
        told.seq.append(seq)
        told.attempt.append(group.attempt[i])
    if taken:
        insert(state, worker, log, group, taken, outcomes, final)
    return yes, no


def outcome_of(
    state: State, batch: AttemptBatch, seq: int, group: ResultGroup, i: int
) -> tuple[Outcome | None, Failure | None]:
    """Return the item's outcome, or None if the attempt ended and the item continues."""
    outcome = group.outcome[i] if group.outcome is not None else Outcome.DONE
    failure = group.failures.get(i)
    if failure is not None and outcome is Outcome.DONE:
        outcome = Outcome.FAILED
    lane = batch.info.lane
    if lane.pruned_at >= 0 and seq > lane.pruned_at:
        return Outcome.SKIPPED, commit.pruned(lane)
    if outcome is not Outcome.FAILED:
        return outcome, failure
    failure = failure or Failure("unknown", "The worker reported a failure without saying why.")
    units_in, units_out = group.units_in, group.units_out
    left = Evidence(
        group.data[i], group.keeps.get(i, ()), units_in[i] if units_in else 0, units_out[i] if units_out else 0
    )
    last = failures.retry_or_fail(state, batch, seq, failure, left)
    return (None, None) if last is None else (Outcome.FAILED, last)


def insert_all(state: State, worker: Worker, log: Log, group: ResultGroup) -> None:
    """Insert the rows of a group of which every entry is DONE, by columns."""
    n = len(group.seq)
    nothing = [0] * n
    rows = ResultRows(
        log.id, group.seq, group.attempt, [Outcome.DONE] * n, group.data, {}, group.duration_ms,
        group.units_in or nothing, group.units_out or nothing, worker.id, state.now.wall_ms, keeps=group.keeps,
    )  # fmt: skip
    _accept(state, worker, log, rows)


def insert(
    state: State, worker: Worker, log: Log, group: ResultGroup, at: list[int], outcomes: list[Outcome],
    final: dict[int, Failure],
) -> None:  # fmt: skip
    """Insert rows from the entries `at` of the group."""

    def pick(column: list[int] | None) -> list[int]:
        return [0] * len(at) if column is None else [column[i] for i in at]

    rows = ResultRows(
        log.id, pick(group.seq), pick(group.attempt), outcomes, [group.data[i] for i in at], final,
        pick(group.duration_ms), pick(group.units_in), pick(group.units_out), worker.id, state.now.wall_ms,
        keeps={place: group.keeps[i] for place, i in enumerate(at) if i in group.keeps},
    )  # fmt: skip
    _accept(state, worker, log, rows)


def _accept(state: State, worker: Worker, log: Log, rows: ResultRows) -> None:
    worker.done += len(rows.seq)
    log.units_in += sum(rows.units_in)
    log.units_out += sum(rows.units_out)
    commit.accept_rows(state, log, rows)
