"""Workers that broke the protocol, and attempts that may still run where nobody is believed any more.

An exclusive attempt of such a worker stays in flight until its process has surely fenced itself. It does once nothing
moves its fence: Work refuses its Hello, and no beat of it is answered (`barred`). So its deadline is that of a silent
worker, after which `scan` takes back what is left.
"""

from __future__ import annotations

from rollout.model.errors import ProtocolError, RolloutError
from rollout.model.item import Failure
from rollout.model.run import ENDED
from rollout.model.worker import WorkerState

from rollout_coordinator.core import results, workers
from rollout_coordinator.core.attempts import cancel
from rollout_coordinator.core.settings import QUARANTINED_MAX
from rollout_coordinator.core.state import AttemptBatch, State, Worker
from rollout_coordinator.core.step import CloseSession, Emit


def quarantine(state: State, worker: Worker, error: RolloutError) -> None:
    """No more work for this incarnation, and what it held goes to others: what is exclusive, when it is over there."""
    session = worker.session
    workers.leave(state, worker, "fault", error.message)
    workers.extend_deadline(state, worker, state.now.mono)  # an answer may have gone out until now
    workers.reclaim(state, worker, "quarantined", lost=True, spare=exclusive)
    workers.write(state, worker)
    if session:
        state.step.sends.append(CloseSession(session, error))
    state.step.sends.append(Emit("worker_quarantined", "error", {"worker": worker.id, "reason": error.message}))
    known = [w.id for w in state.workers.values() if w.state is WorkerState.QUARANTINED and not w.batches]
    for oldest in known[:-QUARANTINED_MAX]:
        del state.workers[oldest]


def exclusive(batch: AttemptBatch, seq: int) -> bool:
    return batch.info.spec.exclusive


def may_run(batch: AttemptBatch, seq: int) -> bool:
    """Of a worker that said Goodbye: one that it could not stop in time. Those that it began it told of before."""
    return batch.info.spec.exclusive and (seq in batch.started or batch.maybe_started)


def over_by_now(state: State, worker: Worker) -> None:
    """The worker left long enough ago to have fenced itself, or to have ended."""
    workers.reclaim(state, worker, worker.state.value, lost=True)


def barred(state: State, incarnation: str) -> RolloutError | None:
    worker = state.workers.get(incarnation)
    if worker is None or worker.state is not WorkerState.QUARANTINED:
        return None
    return ProtocolError(f"worker {worker.id} is quarantined: {worker.reason}. Start it anew.")


def overdue(state: State) -> None:
    """Backstop for attempts whose worker does not enforce their timeout: 2 x timeout + orphan_grace.

    Whoever keeps an exclusive attempt for so long may keep it for longer: its item waits for the worker's fence.
    """
    for batch in list(state.timed.values()):
        spec = batch.info.spec
        limit = 2 * spec.timeout_ms / 1000 + state.settings.orphan_grace
        for seq, began in list(batch.started_at.items()):
            if batch.log.flight.get(seq) is not batch:
                del batch.started_at[seq]
            elif state.now.mono - began > limit and seq not in batch.waiting and batch.log.run.state not in ENDED:
                del batch.started_at[seq]
                if batch.worker.state not in workers.ALIVE:
                    continue  # its deadline decides
                if spec.exclusive and batch.failures + 1 < spec.max_attempts:
                    key = f"{batch.log.id}/{seq}/{batch.attempt}"
                    quarantine(
                        state, batch.worker, ProtocolError(f"It did not end {key} within {limit:.0f} s, a timeout.")
                    )
                    continue
                cancel(batch.worker, [(batch, [seq])], "timeout", state.step.sends)
                failure = Failure("timeout", f"no result within {limit:.0f} s", True)
                outcome, final = results.retry_or_fail(state, batch, seq, failure)
                if outcome is not None and final is not None:
                    results.close_failed(state, batch, seq, final)
