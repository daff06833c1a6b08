"""The core: events in, one Step out. All decisions of the coordinator are made here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rollout.model.errors import RolloutError

from rollout_coordinator.core import (
    commit,
    dispatch,
    look,
    policies,
    quarantine,
    replay,
    results,
    runs,
    spawn,
    steal,
    submit,
    verbs,
    window,
    workers,
)
from rollout_coordinator.core import events as ev
from rollout_coordinator.core.events import Event, Now
from rollout_coordinator.core.journal import write_dirty
from rollout_coordinator.core.settings import CoreSettings
from rollout_coordinator.core.state import State
from rollout_coordinator.core.step import Snapshot, Step
from rollout_coordinator.core.views import RunView, WorkerView


def _answered(c: State, event: ev.IdsLoaded | ev.ResultsLoaded) -> None:
    note = c.loads.pop(event.load_id, None)
    if note is not None and (note.kind == "ids" or note.log in c.logs):  # a client waits for what ids say
        note.call(event)


def _tick(c: State, event: ev.Tick) -> None:
    pass  # time is looked at in every step


_HANDLERS: dict[type, Callable[[State, Any], None]] = {
    ev.SubmitOpen: submit.open_submit,
    ev.SubmitItems: submit.submit_items,
    ev.SubmitSeal: submit.seal,
    ev.RunCommand: verbs.command,
    ev.RunDelete: verbs.delete,
    ev.WorkerHello: workers.hello,
    ev.WorkerGone: workers.gone,
    ev.WorkerGoodbye: workers.goodbye,
    ev.WorkerBeat: workers.beat,
    ev.WorkerCredit: workers.credit,
    ev.WorkerStarted: results.started,
    ev.WorkerResults: results.results,
    ev.WorkerReleased: results.released,
    ev.WorkerConfirm: results.confirm,
    ev.WorkerSpawn: spawn.spawn,
    ev.WorkerWaiting: spawn.waiting,
    ev.WorkerProgress: workers.progress,
    ev.WorkerCommand: workers.command,
    ev.Loaded: window.loaded,
    ev.IdsLoaded: _answered,
    ev.ResultsLoaded: _answered,
    ev.RunLoaded: replay.recall,
    ev.Tick: _tick,
}


class Core:
    """Owns all mutable state of the coordinator. Not thread-safe; one driver calls it."""

    def __init__(self, settings: CoreSettings) -> None:
        self._state = State(settings)

    @classmethod
    def replay(cls, settings: CoreSettings, snapshot: Snapshot, now: Now) -> Core:
        """A core that goes on where the ledger says the last one stopped."""
        core = cls(settings)
        replay.restore(core._state, snapshot, now)
        return core

    def handle(self, events: Sequence[Event], now: Now) -> Step:
        """Everything that follows from `events` at `now`. Do with it what `step.py` says, then call again."""
        c = self._state
        c.now = now
        c.wake = None
        step = c.step = Step()
        replay.reread(c)
        workers.allow_for_stall(c)
        # what arrived is read before anybody is declared silent
        for event in events:
            _HANDLERS[type(event)](c, event)
        workers.scan(c)
        verbs.deadlines(c)
        runs.forget_ended(c)
        window.fire_timers(c)
        self._settle(c)
        write_dirty(c)
        runs.forget_over(c)
        step.wake_at = c.wake
        return step

    @staticmethod
    def _settle(c: State) -> None:
        while c.moved:  # a policy may end items, which moves cursors again
            moved, c.moved = c.moved, {}
            for log in moved.values():
                commit.advance(c, log)
            for log in moved.values():
                if log.parent is None:
                    policies.serve_appends(c, log.run)
                    commit.finish_if_complete(c, log.run)
        spawn.serve_readers(c)
        if c.dirty:
            dispatch.dispatch(c)
            steal.seek(c)
        elif c.steal_due:
            steal.seek(c)
        c.steal_due = False
        if c.window_dirty:
            for log in c.window_dirty.values():
                window.refill(c, log)
            c.window_dirty = {}

    def run_view(self, run_id: str) -> RunView | None:
        run = self._state.runs.get(run_id)
        return None if run is None else look.run_view(self._state, run)

    def run_views(self) -> list[RunView]:
        return [look.run_view(self._state, run) for run in self._state.runs.values()]

    def worker_views(self, now: Now) -> list[WorkerView]:
        return [look.worker_view(self._state, worker, now) for worker in self._state.workers.values()]

    def barred(self, incarnation: str) -> RolloutError | None:
        """Why nothing of this worker's is acknowledged; None for an honest one. Asked at each of its beats."""
        return quarantine.barred(self._state, incarnation)

    def gauges(self) -> dict[str, float]:
        """Numbers for metrics, by name; counters end in `_total` and count since this core began."""
        return look.gauges(self._state)
