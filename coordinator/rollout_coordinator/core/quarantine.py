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
from rollout_coordinator.core.state import Grant, State, Worker
from rollout_coordinator.core.step import CloseSession, Emit


def quarantine(c: State, worker: Worker, error: RolloutError) -> None:
    """No more work for this incarnation, and what it held goes to others: what is exclusive, when it is over there."""
    session = worker.session
    workers.leave(c, worker, "fault", error.message)
    workers.heard(c, worker, c.now.mono)  # an answer may have gone out until now
    workers.take_back(c, worker, "quarantined", lost=True, spare=exclusive)
    workers.write(c, worker)
    if session:
        c.step.sends.append(CloseSession(session, error))
    c.step.sends.append(Emit("worker_quarantined", "error", {"worker": worker.id, "reason": error.message}))
    known = [w.id for w in c.workers.values() if w.state is WorkerState.QUARANTINED and not w.grants]
    for oldest in known[:-QUARANTINED_MAX]:
        del c.workers[oldest]


def exclusive(grant: Grant, seq: int) -> bool:
    return grant.info.spec.exclusive


def may_run(grant: Grant, seq: int) -> bool:
    """Of a worker that said Goodbye: one that it could not stop in time. Those that it began it told of before."""
    return grant.info.spec.exclusive and (seq in grant.started or grant.unsure)


def over_by_now(c: State, worker: Worker) -> None:
    """The worker left long enough ago to have fenced itself, or to have ended."""
    workers.take_back(c, worker, worker.state.value, lost=True)


def barred(c: State, incarnation: str) -> RolloutError | None:
    worker = c.workers.get(incarnation)
    if worker is None or worker.state is not WorkerState.QUARANTINED:
        return None
    return ProtocolError(f"worker {worker.id} is quarantined: {worker.reason}. Start it anew.")


def overdue(c: State) -> None:
    """Backstop for attempts whose worker does not enforce their timeout: 2 x timeout + orphan_grace.

    Whoever keeps an exclusive attempt for so long may keep it for longer: its item waits for the worker's fence.
    """
    for grant in list(c.timed.values()):
        spec = grant.info.spec
        limit = 2 * spec.timeout_ms / 1000 + c.settings.orphan_grace
        for seq, began in list(grant.started_at.items()):
            if grant.log.flight.get(seq) is not grant:
                del grant.started_at[seq]
            elif c.now.mono - began > limit and seq not in grant.waiting and grant.log.run.state not in ENDED:
                del grant.started_at[seq]
                if grant.worker.state not in workers.ALIVE:
                    continue  # its deadline decides
                if spec.exclusive and grant.failures + 1 < spec.max_attempts:
                    key = f"{grant.log.id}/{seq}/{grant.attempt}"
                    quarantine(c, grant.worker, ProtocolError(f"It did not end {key} within {limit:.0f} s, a timeout."))
                    continue
                cancel(grant.worker, [(grant, [seq])], "timeout", c.step.sends)
                failure = Failure("timeout", f"no result within {limit:.0f} s", True)
                outcome, final = results.judge_failure(c, grant, seq, failure)
                if outcome is not None and final is not None:
                    results.close_failed(c, grant, seq, final)
