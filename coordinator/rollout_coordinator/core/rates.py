"""Rates of runs: a few counts of the last half minute for each live run."""

from __future__ import annotations

from rollout.model.run import ENDED, RunState

from rollout_coordinator.core.state import Run, State

WINDOW_S = 30.0
EVERY_S = 1.0


def sample(state: State) -> None:
    """Record the counts of every running run. Called at every scan; most calls do nothing."""
    now = state.now.mono
    held = {run_id for worker in state.workers.values() if worker.session for run_id in worker.by_run}
    for run in state.runs.values():
        if run.state not in ENDED:
            note_busy(state, run, held=run.id in held)
        samples = run.samples
        if run.state is not RunState.RUNNING:
            samples.clear()
        elif not samples or now - samples[-1][0] >= EVERY_S:
            samples.append((now, *counts(run)))
            while len(samples) > 2 and now - samples[1][0] >= WINDOW_S:
                samples.popleft()


def note_busy(state: State, run: Run, *, held: bool) -> None:
    """Add the time since the last call to the run's working time if a connected worker held some of it or it has new
    results. It is written with the log's row, whenever that is written."""
    now, done = state.now.mono, sum(run.root.counts)
    if held or done != run.busy_count:
        run.root.progress.busy_ms += round((now - run.busy_at) * 1000)
    run.busy_at, run.busy_count = now, done


def counts(run: Run) -> tuple[int, int]:
    """Return (items with a result, units out) of its root log."""
    return sum(run.root.counts), run.root.units_out


def rates(state: State, run: Run) -> tuple[float, float]:
    """Return items and units out per second, over the window or since the run resumed."""
    if not run.samples or run.state is not RunState.RUNNING:
        return 0.0, 0.0
    at, items, units = run.samples[0]
    seconds = state.now.mono - at
    if seconds < EVERY_S:
        return 0.0, 0.0
    items_now, units_now = counts(run)
    return (items_now - items) / seconds, (units_now - units) / seconds
