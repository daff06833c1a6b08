"""Acceptance, the commit cursor and the ordered commit log, and the effects of commit-time policies.

Schedule order: the cursor moves over the contiguous prefix of accepted results; policies see them there, in order, and
nowhere else. Arrival order: a result is committed when it is accepted and gets its position in the log.

Groups (`first_success`, from the items' own specs) are decided in the same place: the first member that is done cancels
the others.
"""

from __future__ import annotations

from rollout.model import events as names
from rollout.model.item import AttemptEnd, Blob, Failure, Outcome

from rollout_coordinator.core import (
    attempts,
    chains,
    items,
    logs,
    object_retention,
    policies,
    queues,
    row_failures,
    run_limits,
    runs,
)
from rollout_coordinator.core.index import release
from rollout_coordinator.core.reasons import first_line
from rollout_coordinator.core.state import AttemptBatch, LaneState, Log, Run, SpecInfo, State, touch
from rollout_coordinator.core.step import AttemptRow, Emit, ResultRows, RunMoved
from rollout_coordinator.core.transitions import RestState

REASON_MAX = 1000  # characters

# ---- acceptance


def accept_rows(state: State, log: Log, rows: ResultRows) -> None:
    """Write results, durable after this step, and update the counters and the cursor. Their items are already
    accepted."""
    counts = log.counts
    if rows.failures:
        row_failures.note(state, log, rows)
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
    if rows.failures and log.parent is None:
        log.run.failures.add(rows)
        last = max(rows.failures)
        log.run.last_failure = (rows.seq[last], first_line(rows.failures[last].message)[:REASON_MAX])
    if log.run.limits is not None:
        run_limits.count_results(log, rows)
        state.effects.limited[log.run.id] = log.run
    state.totals["accepted"] += len(rows.seq)
    state.step.writes.results.append(rows)
    if rows.keeps:
        rows.spared = object_retention.spared(log)
    for index in rows.keeps:
        if rows.outcome[index] is Outcome.DONE:
            object_retention.note_result(log, rows.seq[index], rows.accepted_ms)
        else:
            object_retention.note_failure(log, rows.seq[index])
    touch(state, log)
    state.effects.accepted[log.id] = log
    if log.by_arrival:
        n = len(rows.seq)
        rows.position = list(range(log.cursor, log.cursor + n))
        log.cursor += n
        if log.run.tracked and log.parent is None:
            for seq in rows.seq:
                commit_one(state, log, seq)


def end_in_flight(state: State, batch: AttemptBatch, seq: int, outcome: Outcome, data: Blob, cause: str) -> None:
    """End the item of this attempt with a result whose row the caller writes. `cause` is result, or close without a
    result."""
    log = batch.log
    attempts.end(state, batch, [seq], cause)
    note_outcome(state, log, seq, outcome, batch.info)
    if batch.info.spec.chain:
        if outcome is Outcome.DONE:
            chains.item_done(batch, seq, data)
        else:
            attempts.drop_dependents(state, batch, seq)
    child = log.children.get(seq)
    if child is not None:
        logs.close_children(state, child)


def close_in_flight(
    state: State, batch: AttemptBatch, seq: int, failure: Failure, outcome: Outcome = Outcome.FAILED
) -> None:
    """End an item in flight by the core's own decision (dead letter, timeout, lost group): a result without data."""
    if outcome in (Outcome.CANCELLED, Outcome.SKIPPED) and not batch.maybe_started and seq not in batch.started:
        # Of an item with a result, this row alone says that its last attempt never began.
        log, attempt, worker = batch.log.id, batch.attempt, batch.worker.id
        row = AttemptRow(
            log, seq, attempt, worker, AttemptEnd.RELEASED, failure.code, failure.message, state.now.wall_ms
        )
        state.step.writes.attempts.append(row)
    end_in_flight(state, batch, seq, outcome, b"", "close")
    rows = ResultRows(
        batch.log.id, [seq], [batch.attempt], [outcome], [b""], {0: failure}, [0], [0], [0], batch.worker.id,
        state.now.wall_ms,
    )  # fmt: skip
    accept_rows(state, batch.log, rows)


def close_pending(state: State, log: Log, spec: int, seqs: list[int], outcome: Outcome, failure: Failure) -> None:
    """End items without an attempt, by a result of attempt 0, so that the cursor can pass."""
    items.close(log, seqs)
    if object_retention.has_claims(log):
        for seq in seqs:
            object_retention.settle(state, log, seq)
    n, info = len(seqs), log.run.specs[spec]
    data: list[Blob] = [b""] * n
    rows = ResultRows(
        log.id, list(seqs), [0] * n, [outcome] * n, data, dict.fromkeys(range(n), failure), [0] * n, [0] * n, [0] * n,
        "", state.now.wall_ms,
    )  # fmt: skip
    for seq in seqs:
        note_outcome(state, log, seq, outcome, info)
    accept_rows(state, log, rows)


def note_outcome(state: State, log: Log, seq: int, outcome: Outcome, info: SpecInfo) -> None:
    """Keep the outcome until the cursor passes it, if a policy needs it."""
    run = log.run
    if run.tracked and log.parent is None:
        log.outcomes[seq] = (int(outcome), info.index)
    elif info.lane.name:
        count_lane(state, run, info.lane, outcome)


def count_lane(state: State, run: Run, lane: LaneState, outcome: Outcome, n: int = 1) -> None:
    if outcome is Outcome.DONE:
        lane.done += n
        lane.consecutive = 0
    elif outcome is Outcome.FAILED:
        lane.failed += n
        lane.consecutive += n
    else:
        return
    state.effects.lanes[run.id, lane.name] = lane


# ---- the cursor


def advance(state: State, log: Log) -> None:
    """Move the cursor to the end of the accepted prefix."""
    before = log.cursor
    if not log.by_arrival:
        if not log.run.tracked or log.parent is not None:
            items.commit_prefix(log)
        elif not log.rereading:
            while log.cursor in log.accepted and runs.live(log.run):
                commit_one(state, log, log.cursor)
            log.accepted.forget(log.cursor)  # a policy that ended the run stops the cursor short of the others
        if log.cursor > before:
            if log in log.run.index.waiting:
                release(log.run.index, log)
                state.effects.dispatch = True
            if log.reader is not None:
                state.effects.children[log.id] = log
    if log.cursor > before or log.by_arrival:
        touch(state, log)
        if log.parent is None:
            state.step.sends.append(RunMoved(log.run.id))
            state.step.sends.append(
                Emit("item_committed", "debug", {"run_id": log.run.id, "cursor": log.cursor, "log": log.id})
            )


def commit_one(state: State, log: Log, seq: int) -> None:
    """Commit one result of a log whose policies, lanes or groups need each."""
    known = log.outcomes.pop(seq, None)
    outcome = None if known is None else Outcome(known[0])
    items.commit(log, seq, outcome)
    if known is None or outcome is None:
        return
    info = log.run.specs[known[1]]
    if info.lane.name:
        count_lane(state, log.run, info.lane, outcome)
    if info.spec.group:
        decide_group(state, log, seq, outcome, info.spec.group)
    for policy in log.run.policies:
        decision = policy.decide(log, seq, outcome, info) if policy.decide is not None else None
        if isinstance(decision, policies.PruneLane):
            prune(state, log, info.lane, seq)
        elif isinstance(decision, policies.EndRun) and runs.live(log.run):
            failed, why = log.run.last_failure
            because = f": {why}" if why and failed == seq and log.parent is None else ""
            runs.end(state, log.run, decision.cause, decision.reason + because)
        elif isinstance(decision, policies.LetGo):
            state.step.writes.released += [(log.id, one) for one in decision.seqs]


def finish_if_complete(state: State, run: Run) -> None:
    """Complete the run if it is sealed and everything is committed. Failed items do not fail the run."""
    root = run.root
    if not root.sealed or root.rereading or not runs.live(run) or root.cursor < root.submitted:
        return
    if not policies.wants_more(run):
        runs.end(state, run, "complete", root.progress.rest.why)


# ---- what a result decides about others


def keep_within(state: State, run: Run) -> None:
    """Skip the run's own pending items if it has reached a limit; running ones continue. This includes items that are
    later read from the ledger, or returned by a worker that had not begun them."""
    log = run.root
    reason = run_limits.reached(log)
    if not reason:
        return
    run_limits.skip_rest(log, reason)
    touch(state, log)
    state.step.sends.append(
        Emit(names.REST_SKIPPED, "warning", {"run_id": run.id, "name": run.spec.name, "reason": reason})
    )
    queues.forget_delays(state, log)
    close_behind(state, log, run.specs, [], -1, flight=False)
    state.effects.accepted[log.id] = state.effects.window[log.id] = log


def decide_group(state: State, log: Log, seq: int, outcome: Outcome, group: str) -> None:
    members = log.members.get(group, set())
    members.discard(seq)
    if outcome is Outcome.DONE and group not in log.groups:
        log.groups[group] = seq
        close_behind(state, log, log.run.by_group[group], sorted(members), seq, flight=True)
    if not members:
        log.members.pop(group, None)


def prune(state: State, log: Log, lane: LaneState, seq: int) -> None:
    lane.pruned_at = seq
    state.effects.lanes[log.run.id, lane.name] = lane
    behind = [later for later, (_, spec) in log.outcomes.items() if log.run.specs[spec].lane is lane]
    close_behind(state, log, [info for info in log.run.specs if info.lane is lane], behind, seq, flight=False)


def close_behind(state: State, log: Log, infos: list[SpecInfo], members: list[int], seq: int, flight: bool) -> None:
    """End what is behind the decision at `seq`. These are pending items of the specs, pending and accepted ones of
    `members`, which were assigned, and if `flight` the attempts."""
    for later in members:
        outcome, spec = log.outcomes.get(later, (0, 0))
        if later > seq and outcome in (Outcome.DONE, Outcome.FAILED):
            log.outcomes[later] = (int(Outcome.SKIPPED), spec)
            log.counts[outcome] -= 1
            log.counts[Outcome.SKIPPED] += 1
            state.step.writes.prune.append((log.id, later, seq))
    for info in infos:
        for queue in log.queues.get(info.index, {}).values():
            if not queue.size:
                continue
            for *_, history in queue.retry:
                run_limits.count_over(log, history.failed_by, 1)
            verdict = verdict_on(log, info.index)
            assert verdict is not None
            close_pending(state, log, info.index, queues.take_all(state, queue), *verdict)
    if not flight:
        return
    for batch in dict.fromkeys(log.flight[one] for one in members if one in log.flight):
        verdict = verdict_on(log, batch.info.index)
        assert verdict is not None
        outcome, failure = verdict
        seqs = attempts.open_seqs(batch)
        attempts.cancel(state, batch.worker, [(batch, seqs)], failure.code)
        for one in seqs:
            if log.flight.get(one) is batch:
                close_in_flight(state, batch, one, failure, outcome)


def verdict_on(log: Log, spec: int) -> tuple[Outcome, Failure] | None:
    """Return how items of this spec end without running: their lane is pruned, their group is won, or all is
    skipped."""
    if log.parent is None and log.rest is RestState.SKIPPED:
        reason = log.progress.rest.why
        return Outcome.SKIPPED, Failure("rest_skipped", f"not begun before the rest was skipped: {reason}", False)
    info = log.run.specs[spec]
    if info.lane.pruned_at >= 0:
        return Outcome.SKIPPED, pruned(info.lane)
    winner = log.groups.get(info.spec.group) if info.spec.group else None
    if winner is not None:
        return Outcome.CANCELLED, Failure("group_won", f"group {info.spec.group!r} was won by row {winner + 1}", False)
    return None


def pruned(lane: LaneState) -> Failure:
    return Failure("lane_pruned", f"lane {lane.name!r} was pruned at row {lane.pruned_at + 1}", False)
