"""Causes why workers cannot start what runs need: an engine, a plugin, a sandbox, a function.

A worker reports all its causes at once, and again on each stream, so they are kept in memory only. They cost no item a
try: what waited for the start is returned, and goes to workers without such a cause. When there is none, and the
workers report that retrying is useless, the run ends with the cause; it can be resumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rollout.model.run import RunState
from rollout.model.worker import WorkerState

from rollout_coordinator.core import reasons, runs
from rollout_coordinator.core.capacity import fits, parents_full, room_for_roots, room_to_horizon
from rollout_coordinator.core.chains import waits_for_earlier
from rollout_coordinator.core.events import CannotStart, WorkerCauses
from rollout_coordinator.core.state import Requirements, Run, StartFailure, State, Worker
from rollout_coordinator.core.step import Emit, RunMoved, SendRunEnded
from rollout_coordinator.core.views import CauseView
from rollout_coordinator.core.workers import worker_of_session

CAUSES_MAX = 1000  # of one worker
MESSAGE_MAX = 4000  # characters
REASON_MAX = 1000


def told(state: State, event: WorkerCauses) -> None:
    worker = worker_of_session(state, event.session)
    if worker is None:
        return
    before = {cause.about: cause for cause in worker.causes}
    worker.causes = []
    for said in event.causes[:CAUSES_MAX]:
        run = state.runs.get(said.run_id)
        if run is None or not runs.live(run):  # the order was lost with the stream before
            ended = run.state.value if run is not None else RunState.FAILED.value
            state.step.sends.append(SendRunEnded(event.session, said.run_id, ended))
            continue
        cause = _cause(state, said, before.get((said.run_id, said.executor, said.limits)))
        worker.causes.append(cause)
        if cause.about not in before:
            _emit(state, worker, cause)
        state.wake_by(cause.until)
    for run_id in {c.run_id for c in [*before.values(), *worker.causes]}:
        state.step.sends.append(RunMoved(run_id))
    state.effects.capacity_freed(worker)
    state.effects.causes = True


def _cause(state: State, said: CannotStart, known: StartFailure | None) -> StartFailure:
    now_ms = state.now.wall_ms
    again = known is not None and known.times == said.times
    until = state.now.mono + said.retry_in if said.retry_in > 0 else 0.0
    return StartFailure(
        said.run_id, said.executor, said.limits, said.code, said.message[:MESSAGE_MAX], said.times, said.final,
        first_ms=known.first_ms if known is not None else now_ms,
        last_ms=known.last_ms if known is not None and again else now_ms,
        until=until,
    )  # fmt: skip


def _emit(state: State, worker: Worker, cause: StartFailure) -> None:
    fields = {
        "worker": worker.id, "host": worker.inventory.host, "run_id": cause.run_id, "executor": cause.executor,
        "code": cause.code, "error": cause.message,
    }  # fmt: skip
    state.step.sends.append(Emit("worker_cannot_start", "warning", fields))


def try_again(state: State) -> None:
    """Assign again what workers could not start, once their pause is over."""
    for worker in state.workers.values():
        for cause in worker.causes:
            if cause.until and cause.until <= state.now.mono:
                cause.until = 0.0
                state.effects.capacity_freed(worker)
            elif cause.until:
                state.wake_by(cause.until)


def fail_unschedulable(state: State) -> None:
    """End the runs of which nothing can start anywhere."""
    concerned = {cause.run_id for worker in state.workers.values() for cause in worker.causes if cause.final}
    for run_id in concerned:
        run = state.runs.get(run_id)
        if run is None or run.state is not RunState.RUNNING:
            continue
        reason = _hopeless(state, run)
        if reason:
            run.causes = of_run(state, run)
            runs.end(state, run, "fail", reason)
            forget(state, run)


def forget(state: State, run: Run) -> None:
    """Forget an ended run's causes: if it resumes, workers try again."""
    for worker in state.workers.values():
        if worker.causes:
            worker.causes = [cause for cause in worker.causes if cause.run_id != run.id]


def _hopeless(state: State, run: Run) -> str:
    """Return why none of its items can continue, or an empty string if one may or it is unknown.

    What its other executors do is done first. Parents that wait for children run nothing. As long as they wait, there
    is no place for items that were returned because of them, nor for more of the root log once they fill its places.
    """
    if run.in_flight or any(log in run.logs for _, _, log, _ in state.retries):
        return ""
    needed: dict[tuple[Requirements, bool], None] = {}
    for log in run.logs.values():
        if log.closed:
            continue
        if log.returned or log.loading_returned or log.loading:
            return ""  # nobody knows what is on its way from the ledger
        # Where others must be done first, it is decided by whether these can begin.
        begins = (q for q in log.all_queues() if q.size and not waits_for_earlier(q) and room_to_horizon(state, q) > 0)
        needed.update(dict.fromkeys((queue.info.requirements, log.parent is None) for queue in begins))
    workers = list(_ready(state))
    found: list[tuple[Worker, StartFailure]] = []
    for requirements, root in needed:
        able = [worker for worker in workers if fits(worker, requirements)]
        if run.waiting and able:
            able = [w for w in able if requirements not in w.given_back]
            if root:
                able = [w for w in able if room_for_roots(run) > 0 and not parents_full(state, w, run)]
            if not able:
                continue
        causes = [(w, c) for w in able for c in w.causes if c.final and c.concerns(requirements)]
        if not able or {w.id for w, _ in causes} != {w.id for w in able}:
            return ""
        found += causes
    return _reason(found) if found else ""


def _ready(state: State) -> Iterator[Worker]:
    """Yield workers that take work, even if a stream is broken or there was no Hello to a new leader: the deadline
    decides."""
    return (worker for worker in state.workers.values() if worker.state is WorkerState.READY)


def _reason(found: list[tuple[Worker, StartFailure]]) -> str:
    alike: dict[tuple[str, str, str], list[tuple[Worker, StartFailure]]] = {}
    for worker, cause in found:
        alike.setdefault(_kind(cause), []).append((worker, cause))
    most = max(alike.values(), key=len)
    cause, count = most[0][1], len({worker.id for worker, _ in found})
    where = "the only worker that could host it" if count == 1 else f"any of the {count} workers that could host it"
    others = f" (and {len(alike) - 1} other causes elsewhere)" if len(alike) > 1 else ""
    what, newline, place = cause.message[:REASON_MAX].partition("\n")
    return f"executor {cause.executor!r} cannot start on {where}: {what}{others}{newline}{place}"


def _kind(cause: StartFailure) -> tuple[str, str, str]:
    """Return a key that is equal for the same cause on two workers."""
    return cause.executor, cause.code, reasons.alike(cause.message)


# ---- views


def of_run(state: State, run: Run) -> list[CauseView]:
    """Return the causes of a run, equal ones as one, those on most workers first."""
    found = [(w, c) for w in state.workers.values() if w.session for c in w.causes if c.run_id == run.id]
    if not found:  # a run that ended with them tells them on, as long as it is in memory
        return run.causes if run.state is RunState.FAILED else []
    able = list(_ready(state))
    alike: dict[tuple[str, str, str], list[tuple[Worker, StartFailure]]] = {}
    for worker, cause in found:
        alike.setdefault(_kind(cause), []).append((worker, cause))
    views: list[CauseView] = []
    for group in alike.values():
        cause = group[-1][1]
        needed = [r for r in run.requirements.values() if cause.concerns(r)]
        hosts = [w for w in able if any(fits(w, r) for r in needed)]
        everywhere = bool(hosts) and all(any(_same(c, cause) for c in w.causes) for w in hosts)
        views.append(_view(cause, [w for w, _ in group], [c for _, c in group], everywhere))
    return sorted(views, key=lambda view: -len(view.workers))


def _same(one: StartFailure, other: StartFailure) -> bool:
    return one.about == other.about


def of_worker(worker: Worker) -> list[CauseView]:
    return [_view(cause, [worker], [cause], False) for cause in worker.causes] if worker.session else []


def _view(cause: StartFailure, workers: Iterable[Worker], causes: list[StartFailure], everywhere: bool) -> CauseView:
    there = {worker.id: worker for worker in workers}
    return CauseView(
        cause.run_id, cause.executor, cause.code, cause.message, list(there),
        [worker.inventory.host for worker in there.values()], sum(c.times for c in causes),
        min(c.first_ms for c in causes), max(c.last_ms for c in causes), everywhere,
    )  # fmt: skip
