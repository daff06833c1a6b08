"""Outcome of an attempt that failed or was lost with its worker: another attempt, or the end of the item."""

from __future__ import annotations

from collections.abc import Callable

from rollout.model.item import HANDED_OVER, HANDED_OVER_MAX, AttemptEnd, Failure, Outcome
from rollout.model.run import ENDED
from rollout.model.worker import WorkerState

from rollout_coordinator.core import object_retention
from rollout_coordinator.core.attempts import end_attempt, open_seqs
from rollout_coordinator.core.commit import close_in_flight
from rollout_coordinator.core.state import AttemptBatch, State, Worker
from rollout_coordinator.core.step import NO_EVIDENCE, Evidence
from rollout_coordinator.core.transitions import RestState

PREEMPTED = "preempted"
"""Code of an attempt that ended with a machine that gave notice; it costs no try."""


def retry_or_fail(
    state: State, batch: AttemptBatch, seq: int, failure: Failure, left: Evidence = NO_EVIDENCE
) -> Failure | None:
    """Return the failure that ends the item, or None if the item continues. `left` is the attempt's evidence."""
    spec = batch.info.spec
    if failure.code == HANDED_OVER and _may_hand_over(state, batch, left):
        message = "it was given back in the middle; another goes on from there"
        if isinstance(left.data, bytes) and _is_current(batch, seq):
            object_retention.hand_over(state, batch.log, seq, batch.attempt, left.data)
        else:  # nobody goes on from it, so nobody would let go of what it names
            left = left._replace(data=b"", keeps=())
        end_attempt(state, batch, seq, AttemptEnd.RELEASED, HANDED_OVER, message, left=left)
        return None
    if taken_away(state, batch) and (failure.worker_lost or failure.retryable):
        end_attempt(state, batch, seq, AttemptEnd.RELEASED, PREEMPTED, failure.message, left=left)
        return None
    if failure.worker_lost:
        final = loss_is_final(state, batch)
        if final is None:
            end_attempt(state, batch, seq, AttemptEnd.WORKER_LOST, failure.code, failure.message, left=left)
        return final
    if not failure.retryable or batch.log.rest is RestState.SKIPPED or batch.failures + 1 >= spec.max_attempts:
        return failure
    how = AttemptEnd.TIMEOUT if failure.code == "timeout" else AttemptEnd.FAILED
    delay = failure.retry_after_ms
    end_attempt(state, batch, seq, how, failure.code, failure.message, left=left, retry_after_ms=delay)
    return None


def loss_is_final(state: State, batch: AttemptBatch) -> Failure | None:
    """Return why the item is not retried after one more lost worker, or None."""
    spec = batch.info.spec
    if spec.fail_on_worker_lost:
        return Failure("worker_lost", "Its worker was lost, and the item asks not to be tried again.", False, True)
    if batch.losses + 1 >= spec.max_worker_lost:
        lost = batch.losses + 1
        return Failure("dead_letter", f"{lost} workers or engine processes died while they ran it.", False, True)
    return None


def _may_hand_over(state: State, batch: AttemptBatch, left: Evidence) -> bool:
    """Return whether the attempt may hand over: its worker leaves, and so is not assigned it again, and left
    something."""
    leaves = batch.worker.preempted or batch.worker.state is WorkerState.DRAINING
    return leaves and 0 < len(left.data) <= HANDED_OVER_MAX


def _is_current(batch: AttemptBatch, seq: int) -> bool:
    """Return False for an attempt that ended with its predecessor, earlier in the same message."""
    return batch.log.flight.get(seq) is batch and batch.log.run.state not in ENDED


def taken_away(state: State, batch: AttemptBatch) -> bool:
    """Return whether its machine gave notice, to which all failures are then attributed, except for exclusive items."""
    return batch.worker.preempted and not batch.info.spec.fail_on_worker_lost


def worker_lost(state: State, batch: AttemptBatch, seq: int, code: str) -> None:
    """Handle a started attempt that died with its worker."""
    if taken_away(state, batch):
        message = f"the machine of worker {batch.worker.id} was taken away"
        end_attempt(state, batch, seq, AttemptEnd.RELEASED, PREEMPTED, message)
        return
    final = loss_is_final(state, batch) if batch.log.run.state not in ENDED else None
    if final is None:
        end_attempt(state, batch, seq, AttemptEnd.WORKER_LOST, code, f"worker {batch.worker.id} was lost")
        return
    batch.log.worker_lost += 1
    state.totals["worker_lost"] += 1
    failure = Failure(final.code, f"{final.message} Last: {batch.worker.id}", False, True)
    close_in_flight(state, batch, seq, failure)


def not_held(state: State, batch: AttemptBatch, seq: int, code: str, message: str) -> None:
    """Handle an attempt that its incarnation does not hold: never received, or killed when it fenced itself. That is no
    loss of a worker, except where a second run of the item would do harm."""
    if batch.info.spec.fail_on_worker_lost and (batch.maybe_started or seq in batch.started):
        worker_lost(state, batch, seq, code)
    else:
        end_attempt(state, batch, seq, AttemptEnd.RELEASED, code, message)


def reclaim(
    state: State, worker: Worker, code: str, lost: bool, spare: Callable[[AttemptBatch, int], bool] | None = None
) -> int:
    """Make what the worker held, but what is spared, pending again or failed for good. Returns the number of
    attempts."""
    n = 0
    for batch in list(worker.batches.values()):
        for seq in open_seqs(batch):
            if batch.log.flight.get(seq) is not batch or (spare is not None and spare(batch, seq)):
                continue  # the former: dropped with its predecessor
            n += 1
            begun = seq in batch.started or (batch.maybe_started and batch.info.spec.fail_on_worker_lost)
            if lost and begun:
                worker_lost(state, batch, seq, code)
            else:
                end_attempt(state, batch, seq, AttemptEnd.RELEASED, code, f"not started on {worker.id}")
    return n


def timed_out(state: State, batch: AttemptBatch, seq: int, failure: Failure) -> None:
    """Handle an attempt that its worker did not end in time."""
    final = retry_or_fail(state, batch, seq, failure)
    if final is not None:
        close_in_flight(state, batch, seq, final, Outcome.FAILED)
