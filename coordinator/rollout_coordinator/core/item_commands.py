"""Commands on single items, by an operator or the command that resumes a run: change their limits, or end them."""

from __future__ import annotations

from dataclasses import replace

from rollout.model.errors import NotFoundError, RolloutError, StateError
from rollout.model.item import Failure, Outcome
from rollout.model.run import RunState

from rollout_coordinator.core import attempts, commit, index, items, logs, queues, replay, run_limits, runs
from rollout_coordinator.core.events import ItemCancel, Loaded, RunLimits
from rollout_coordinator.core.state import Log, Run, State, reply, touch_run
from rollout_coordinator.core.status import run_view
from rollout_coordinator.core.step import Emit, LoadItems, RunConfigured

CANCELLED = "cancelled"


def limits(state: State, event: RunLimits) -> None:
    run = replay.find_run(state, event)
    if run is None:
        return
    if run.state is RunState.COMPLETED:
        error = StateError(f"run {run.id} is complete: none of its rows waits for a result")
        reply(state, event.request, error=error)
        return
    run.spec = replace(run.spec, config=event.config)
    state.step.sends.append(RunConfigured(run.id))
    runs.set_limits(state, run, event.limits)
    touch_run(state, run)
    reply(state, event.request, run_view(state, run))


def cancel(state: State, event: ItemCancel) -> None:
    """Cancel the item: a later result of its attempt is stale, like that of any superseded one."""
    run = replay.find_run(state, event)
    if run is None:
        return
    log, seq = _log_of(run, event.place), event.place[-1]
    if log is None or not 0 <= seq < log.submitted:
        reply(state, event.request, error=NotFoundError(f"run {run.id} has no row {_row(event)}"))
        return
    if (refusal := _refusal(run, log, event)) is not None:
        reply(state, event.request, error=refusal)
        return
    by = event.by or "an operator"
    failure = Failure(CANCELLED, f"cancelled by {by}{f': {event.reason}' if event.reason else ''}", False)

    def end(spec: int) -> None:
        batch = log.flight.get(seq)
        if batch is not None:
            attempts.cancel(state, batch.worker, [(batch, [seq])], CANCELLED)
            commit.close_in_flight(state, batch, seq, failure, Outcome.CANCELLED)
        else:
            history = queues.take_one(state, log, seq)
            log.loaded_ahead.discard(seq)
            if history is not None:
                run_limits.count_over(log, history.failed_by, 1)
            commit.close_pending(state, log, spec, [seq], Outcome.CANCELLED, failure)
            if chain := run.specs[spec].spec.chain:  # the next of it may go on
                index.release(run.index, queues.chain_of(log, chain))
            state.effects.window[log.id] = log
            state.effects.dispatch = True
            if (child := log.children.get(seq)) is not None:
                logs.close_children(state, child)
        fields = {
            "run_id": run.id, "name": run.spec.name, "row": _row(event), "by": event.by, "reason": event.reason,
        }  # fmt: skip
        state.step.sends.append(Emit("item_cancelled", "info", fields))
        reply(state, event.request)

    batch = log.flight.get(seq)
    if batch is not None:
        end(batch.info.index)
        return

    def found(loaded: Loaded) -> None:
        error: RolloutError | None = NotFoundError(f"run {run.id} was deleted meanwhile")
        if log.id in state.logs:
            error = _refusal(run, log, event)
        if error is None:
            end(loaded.items[0].spec)
        else:
            reply(state, event.request, error=error)

    state.ask(log, lambda load: LoadItems(load, log.id, [seq]), found, always=True)


def _log_of(run: Run, place: tuple[int, ...]) -> Log | None:
    log: Log | None = run.root
    for seq in place[:-1]:
        log = log.children.get(seq) if log is not None else None
    return log


def _refusal(run: Run, log: Log, event: ItemCancel) -> StateError | None:
    if items.is_accepted(log, event.place[-1]):
        return StateError(f"row {_row(event)} of run {run.id} has its result already")
    if runs.ended(run):
        return StateError(f"run {run.id} is {run.state.value}: none of its rows runs; `resume` it first")
    return StateError(f"the parent of row {_row(event)} of run {run.id} has its result") if log.closed else None


def _row(event: ItemCancel) -> str:
    return ".".join(str(seq + 1) for seq in event.place)
