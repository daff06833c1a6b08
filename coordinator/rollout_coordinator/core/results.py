"""Results, starts and returned attempts: what a worker says about the attempts it holds.

Only the newest session of the worker that holds the attempt is listened to. A result for an attempt that was taken
away is stale: counted, told, forgotten. One for an attempt that was never given to anybody is a protocol fault.
"""

from __future__ import annotations

from rollout.model.errors import ProtocolError
from rollout.model.item import AttemptEnd, Failure, ItemState, Outcome
from rollout.model.run import ENDED

from rollout_coordinator.core import chains, commit, quarantine, workers
from rollout_coordinator.core.attempts import close, end_attempt, state_of
from rollout_coordinator.core.events import (
    Keys,
    ResultGroup,
    WorkerConfirm,
    WorkerReleased,
    WorkerResults,
    WorkerStarted,
)
from rollout_coordinator.core.state import AttemptBatch, Log, State, Worker, touch
from rollout_coordinator.core.step import ResultRows, SendAccepted
from rollout_coordinator.core.transitions import ITEM

RELEASE_ENDS = {"pause": AttemptEnd.PAUSED}


def started(state: State, event: WorkerStarted) -> None:
    worker = workers.worker_of_session(state, event.session)
    if worker is None:
        return
    ITEM.move(ItemState.ASSIGNED, "start")
    for keys in event.keys:
        log = state.logs.get(keys.log)
        if log is None:
            continue
        flight, n = log.flight, 0
        for seq, attempt in zip(keys.seq, keys.attempt, strict=True):
            batch = flight.get(seq)
            if batch is None or batch.worker is not worker or batch.attempt != attempt or seq in batch.started:
                continue
            batch.started.add(seq)
            n += 1
            if batch.info.spec.timeout_ms:
                batch.started_at[seq] = state.now.mono
        worker.running += n
        log.run.running += n


def results(state: State, event: WorkerResults) -> None:
    worker = workers.worker_of_session(state, event.session)
    if worker is None:
        return
    accepted: list[Keys] = []
    stale: list[Keys] = []
    for group in event.groups:
        log = state.logs.get(group.log)
        fault = impossible(state, log, group)
        if fault:
            quarantine.quarantine(state, worker, ProtocolError(fault))
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
    """Why nobody can ever have been given these attempts; empty if it is possible.

    A new leader knows no history, so only what cannot be under any history counts.
    """
    if log is None:
        if group.log >= state.next_log or group.log < 1:
            return f"Result for log {group.log}, which was never opened: it cannot have been assigned."
        return ""
    if group.seq and (max(group.seq) >= log.submitted or min(group.seq) < 0):
        return f"Result for seq {max(group.seq)} of log {log.id}, which has only {log.submitted} items."
    flight = log.flight
    for seq, attempt in zip(group.seq, group.attempt, strict=True):
        batch = flight.get(seq)
        if attempt < 1 or (batch is not None and attempt > batch.attempt):
            return f"Result for attempt {attempt} of seq {seq} in log {log.id}, which was never given to any worker."
    return ""


def take_group(state: State, worker: Worker, log: Log, group: ResultGroup) -> tuple[Keys, Keys]:
    """Accept what is current. The common group (one batch, all done) is handled column by column."""
    flight, seqs, attempts = log.flight, group.seq, group.attempt
    if log.run.state in ENDED:  # of survivors: they are over
        keys = Keys(log.id, seqs, attempts)
        for batch, seq in current(state, worker, keys):
            end_attempt(state, batch, seq, AttemptEnd.RELEASED, "run_ended", "its run has ended")
        return Keys(log.id, [], []), keys
    by_batch: dict[AttemptBatch, list[int]] = {}
    stale: list[int] = []
    seen: set[int] = set()
    for i, seq in enumerate(seqs):
        batch = flight.get(seq)
        if batch is None or batch.worker is not worker or batch.attempt != attempts[i] or seq in seen:
            stale.append(i)
            continue
        seen.add(seq)
        at = by_batch.get(batch)
        if at is None:
            by_batch[batch] = [i]
        else:
            at.append(i)
    plain = not stale and not group.failures and group.outcome is None and not log.run.tracked and not log.children
    if plain and all(not g.info.spec.chain and g.info.lane.pruned_at < 0 for g in by_batch):
        ITEM.move(ItemState.ASSIGNED, "result")
        for batch, at in by_batch.items():
            lane = batch.info.lane
            close(state, batch, seqs if len(at) == len(seqs) else [seqs[i] for i in at])
            if lane.name:
                lane.done += len(at)
                lane.consecutive = 0
                commit.touch_lane(state, log.run, lane)
        insert(state, worker, log, group, list(range(len(seqs))), None)
        return Keys(log.id, seqs, attempts), Keys(log.id, [], [])
    return take_singly(state, worker, log, group, stale)


def take_singly(state: State, worker: Worker, log: Log, group: ResultGroup, stale: list[int]) -> tuple[Keys, Keys]:
    """Failures, chains, policies: one at a time."""
    stale_at = set(stale)
    yes, no = Keys(log.id, [], []), Keys(log.id, [], [])
    taken: list[int] = []
    outcomes: list[Outcome] = []
    failures: dict[int, Failure] = {}
    for i, seq in enumerate(group.seq):
        batch = log.flight.get(seq)
        told = yes
        if i in stale_at or batch is None:
            told = no
        elif batch.predecessor is not None and not chains.stands(log, batch):
            end_attempt(state, batch, seq, AttemptEnd.DROPPED, "predecessor_changed", "its input is not final")
            told = no
        else:
            outcome, failure = outcome_of(state, batch, seq, group, i)
            if outcome is not None:
                if failure is not None:
                    failures[len(taken)] = failure
                taken.append(i)
                outcomes.append(outcome)
                ITEM.move(state_of(batch, seq), "result")
                accept_one(state, batch, seq, outcome, group, i)
        told.seq.append(seq)
        told.attempt.append(group.attempt[i])
    if taken:
        insert(state, worker, log, group, taken, (outcomes, failures))
    return yes, no


def accept_one(state: State, batch: AttemptBatch, seq: int, outcome: Outcome, group: ResultGroup, i: int) -> None:
    log = batch.log
    close(state, batch, [seq])
    commit.note_outcome(state, log, seq, outcome, batch.info)
    if batch.info.spec.chain:
        # accepted before the chain looks: a dropped successor must see its predecessor as final
        chains.result_accepted(state, batch, seq, outcome, group.data[i])
    child = log.children.get(seq)
    if child is not None:
        from rollout_coordinator.core.child_items import close_children

        close_children(state, child)


def outcome_of(
    state: State, batch: AttemptBatch, seq: int, group: ResultGroup, i: int
) -> tuple[Outcome | None, Failure | None]:
    """What this result makes of its item: an outcome, or None when the attempt ended and the item goes on."""
    outcome = group.outcome[i] if group.outcome is not None else Outcome.DONE
    failure = group.failures.get(i)
    if failure is not None and outcome is Outcome.DONE:
        outcome = Outcome.FAILED
    lane = batch.info.lane
    if lane.pruned_at >= 0 and seq > lane.pruned_at:
        return Outcome.SKIPPED, Failure("lane_pruned", f"lane {lane.name!r} was pruned at {lane.pruned_at}", False)
    if outcome is not Outcome.FAILED:
        return outcome, failure
    failure = failure or Failure("unknown", "The worker reported a failure without saying why.")
    return retry_or_fail(state, batch, seq, failure)


def retry_or_fail(
    state: State, batch: AttemptBatch, seq: int, failure: Failure
) -> tuple[Outcome | None, Failure | None]:
    spec = batch.info.spec
    if failure.worker_lost:
        final = loss_is_final(batch)
        if final is not None:
            return Outcome.FAILED, final
        end_attempt(state, batch, seq, AttemptEnd.WORKER_LOST, failure.code, failure.message)
        return None, None
    if not failure.retryable or batch.failures + 1 >= spec.max_attempts:
        return Outcome.FAILED, failure
    end = AttemptEnd.TIMEOUT if failure.code == "timeout" else AttemptEnd.FAILED
    end_attempt(state, batch, seq, end, failure.code, failure.message)
    return None, None


def loss_is_final(batch: AttemptBatch) -> Failure | None:
    """Why the item is not tried again after one more lost worker, or None."""
    spec = batch.info.spec
    if spec.fail_on_worker_lost:
        return Failure("worker_lost", "Its worker was lost, and the item asks not to be tried again.", False, True)
    if batch.losses + 1 >= spec.max_worker_lost:
        lost = batch.losses + 1
        return Failure("dead_letter", f"{lost} workers or engine processes died while they ran it.", False, True)
    return None


def insert(
    state: State, worker: Worker, log: Log, group: ResultGroup, at: list[int],
    ends: tuple[list[Outcome], dict[int, Failure]] | None,
) -> None:  # fmt: skip
    """One ResultRows from the entries `at` of the group; `ends` is None when all are DONE."""
    n = len(at)
    whole = n == len(group.seq)

    def pick(column: list[int] | None) -> list[int]:
        if column is None:
            return [0] * n
        return column if whole else [column[i] for i in at]

    rows = ResultRows(
        log.id, pick(group.seq), pick(group.attempt), [Outcome.DONE] * n if ends is None else ends[0],
        group.data if whole else [group.data[i] for i in at], {} if ends is None else ends[1],
        pick(group.duration_ms), pick(group.units_in), pick(group.units_out), worker.id, state.now.wall_ms,
    )  # fmt: skip
    worker.done += n
    log.units_in += sum(rows.units_in)
    log.units_out += sum(rows.units_out)
    commit.accept_rows(state, log, rows)


def close_failed(
    state: State, batch: AttemptBatch, seq: int, failure: Failure, outcome: Outcome = Outcome.FAILED
) -> None:
    """The core itself ends an item that is in flight (dead letter, timeout, lost group): a result without data."""
    ITEM.move(state_of(batch, seq), "close")
    group = ResultGroup(batch.log.id, [seq], [batch.attempt], [outcome], [b""], {0: failure}, [0])
    accept_one(state, batch, seq, outcome, group, 0)
    insert_for = batch.worker
    rows = ResultRows(
        batch.log.id, [seq], [batch.attempt], [outcome], [b""], {0: failure}, [0], [0], [0], insert_for.id,
        state.now.wall_ms,
    )  # fmt: skip
    commit.accept_rows(state, batch.log, rows)


def released(state: State, event: WorkerReleased) -> None:
    worker = workers.worker_of_session(state, event.session)
    if worker is None:
        return
    end = RELEASE_ENDS.get(event.reason, AttemptEnd.RELEASED)
    for keys in event.keys:
        for batch, seq in current(state, worker, keys):
            if event.reason == "self_fence":
                workers.not_held(state, batch, seq, "self_fence", "its worker was cut off and killed it")
            else:
                end_attempt(state, batch, seq, end, event.reason or "released", "given back by its worker")


def confirm(state: State, event: WorkerConfirm) -> None:
    from rollout_coordinator.core.steal import confirmed

    worker = workers.worker_of_session(state, event.session)
    if worker is not None:
        confirmed(state, worker, event)


def current(state: State, worker: Worker, keys: Keys) -> list[tuple[AttemptBatch, int]]:
    """Those of the keys that are this worker's present attempts."""
    log = state.logs.get(keys.log)
    if log is None:
        return []
    out: list[tuple[AttemptBatch, int]] = []
    for seq, attempt in zip(keys.seq, keys.attempt, strict=True):
        batch = log.flight.get(seq)
        if batch is not None and batch.worker is worker and batch.attempt == attempt:
            out.append((batch, seq))
    return out
