"""The core: events in, one Step out. All decisions of the coordinator are made here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rollout.model.errors import RolloutError

from rollout_coordinator.core import (
    causes,
    child_items,
    commands,
    commit,
    dispatch,
    hello,
    item_commands,
    logs,
    queues,
    rates,
    replay,
    results,
    run_limits,
    runs,
    status,
    steal,
    submit,
    window,
    workers,
)
from rollout_coordinator.core import events as ev
from rollout_coordinator.core.events import Event, Now
from rollout_coordinator.core.settings import CoreSettings
from rollout_coordinator.core.state import Effects, State
from rollout_coordinator.core.step import Snapshot, Step
from rollout_coordinator.core.views import HeldView, RunView, RunWorkerView, WorkerDetail, WorkerView


def _answered(state: State, event: ev.Loaded | ev.IdsLoaded | ev.ResultsLoaded) -> None:
    question = state.questions.pop(event.load_id, None)
    if question is not None and (question.always or question.log in state.logs):
        question.answered(event)


def _tick(state: State, event: ev.Tick) -> None:
    pass  # time is looked at in every step


_HANDLERS: dict[type, Callable[[State, Any], None]] = {
    ev.SubmitOpen: submit.open_submit,
    ev.SubmitItems: submit.submit_items,
    ev.SubmitSeal: submit.seal,
    ev.RunCommand: commands.command,
    ev.RunDelete: commands.delete,
    ev.RunLimits: item_commands.limits,
    ev.ItemCancel: item_commands.cancel,
    ev.WorkerHello: hello.hello,
    ev.WorkerGone: workers.gone,
    ev.WorkerGoodbye: workers.goodbye,
    ev.WorkerLeaving: workers.leaving,
    ev.WorkerBeat: workers.beat,
    ev.WorkerCredit: workers.credit,
    ev.WorkerStarted: results.started,
    ev.WorkerResults: results.results,
    ev.WorkerReleased: results.released,
    ev.WorkerCauses: causes.told,
    ev.WorkerConfirm: steal.confirm,
    ev.WorkerSpawn: child_items.spawn,
    ev.WorkerWaiting: child_items.waiting,
    ev.WorkerProgress: workers.progress,
    ev.WorkerCommand: workers.command,
    ev.Loaded: _answered,
    ev.IdsLoaded: _answered,
    ev.ResultsLoaded: _answered,
    ev.RunLoaded: replay.run_loaded,
    ev.Tick: _tick,
}


class Core:
    """Owner of all mutable state of the coordinator. Not thread-safe; one driver calls it."""

    def __init__(self, settings: CoreSettings) -> None:
        self._state = State(settings)

    @classmethod
    def replay(cls, settings: CoreSettings, snapshot: Snapshot, now: Now) -> Core:
        """Return a core that continues from the ledger's state."""
        core = cls(settings)
        replay.restore(core._state, snapshot, now)
        return core

    def handle(self, events: Sequence[Event], now: Now) -> Step:
        """Return the step that follows from `events` at `now`. `step.py` says what to do with it before the next
        call."""
        state = self._state
        state.now = now
        state.wake = None
        step = state.step = Step()
        replay.reread(state)
        workers.allow_for_stall(state)
        # what arrived is read before anybody is declared silent
        for event in events:
            _HANDLERS[type(event)](state, event)
            if state.effects.redeliver or state.effects.unblocked:
                self._redeliver(state.effects)
        scanned = workers.scan(state)
        if scanned:
            rates.sample(state)
            run_limits.tick(state)
        causes.try_again(state)
        if scanned or state.effects.causes:
            causes.fail_unschedulable(state)
        runs.pause_deadlines(state)
        runs.forget_ended(state)
        queues.fire_timers(state)
        self._hand_up_notes(scanned)
        state.effects.clear()
        state.opened.clear()
        step.wake_at = state.wake
        return step

    def _redeliver(self, effects: Effects) -> None:
        """Handle events that waited for the last one's answer."""
        state = self._state
        while effects.redeliver or effects.unblocked:
            waited, effects.redeliver = effects.redeliver, []
            free, effects.unblocked = effects.unblocked, []
            for other in waited:
                _HANDLERS[type(other)](state, other)
            for log in free:
                while log.held and not log.checking:
                    held = log.held.popleft()
                    _HANDLERS[type(held)](state, held)

    def _hand_up_notes(self, scanned: bool) -> None:
        """Pass this step's notes to the modules that act on them, one kind after the other, each from below."""
        state, effects = self._state, self._state.effects
        while effects.accepted or effects.limited:  # a policy may end items, which moves cursors again
            moved, effects.accepted = effects.accepted, {}
            limited, effects.limited = effects.limited, {}
            for log in moved.values():
                commit.advance(state, log)
            for run in limited.values():
                commit.keep_within(state, run)
            for log in moved.values():
                if log.parent is None:
                    submit.serve_appends(state, log.run)
                    commit.finish_if_complete(state, log.run)
        child_items.serve_readers(state)
        dispatch.remember_workers(state)
        if effects.dispatch:
            dispatch.dispatch(state)
        if effects.dispatch or scanned:
            steal.take_back_skipped(state)
            steal.seek(state)
        for log in effects.window.values():
            window.refill(state, log)
        runs.attempts_over(state)
        self._write_rows()
        logs.forget_over(state)

    def _write_rows(self) -> None:
        """Write the noted rows of logs, runs and lanes, unless they were forgotten in the same step."""
        state, writes, effects = self._state, self._state.step.writes, self._state.effects
        for log in effects.logs.values():
            if log.id in state.logs:
                writes.logs[log.id] = log.row()
        for run in effects.runs.values():
            if run.id in state.runs:
                writes.runs[run.id] = run.row()
        for key, lane in effects.lanes.items():
            if key[0] in state.runs:
                writes.lanes[key] = lane.row(key[0])

    def run_view(self, run_id: str) -> RunView | None:
        """Return a run's view, including what its pending items wait for."""
        run = self._state.runs.get(run_id)
        return None if run is None else status.run_view(self._state, run, with_waits=True)

    def run_views(self) -> list[RunView]:
        """Return all views, without what items wait for."""
        return [status.run_view(self._state, run) for run in self._state.runs.values()]

    def run_workers(self, run_id: str) -> list[RunWorkerView]:
        """Return the workers that work at a run."""
        run = self._state.runs.get(run_id)
        return [] if run is None else status.run_workers(self._state, run)

    def in_flight(self, log: int, seqs: Iterable[int]) -> list[HeldView]:
        """Return those of the items `seqs` of a log that a worker has."""
        return status.in_flight(self._state, log, seqs)

    def running(self, log: int, from_seq: int, limit: int) -> list[int]:
        """Return the first running items of a log from `from_seq` on, ascending."""
        return status.running(self._state, log, from_seq, limit)

    def worker_detail(self, incarnation: str, limit: int) -> WorkerDetail | None:
        """Return a worker with at most `limit` of the attempts it holds, or None if it is unknown."""
        worker = self._state.workers.get(incarnation)
        return None if worker is None else status.worker_detail(self._state, worker, limit)

    def worker_views(self, now: Now) -> list[WorkerView]:
        return [status.worker_view(self._state, worker, now) for worker in self._state.workers.values()]

    def quarantine_error(self, incarnation: str) -> RolloutError | None:
        """Return why nothing of a quarantined worker is acknowledged, else None. Called at each heartbeat."""
        return workers.quarantine_error(self._state, incarnation)

    def gauges(self) -> dict[str, float]:
        """Return numbers for metrics by name; counters end in `_total` and count since this core began."""
        return status.gauges(self._state)
