"""How fast runs go: a few counts of the last half minute for each that is live."""

from __future__ import annotations

from rollout.model.run import RunState

from rollout_coordinator.core.state import Run, State

WINDOW_S = 30.0
EVERY_S = 1.0


def sample(state: State) -> None:
    """Note where every running run stands. Called at every scan; most calls do nothing."""
    now = state.now.mono
    for run in state.runs.values():
        samples = run.samples
        if run.state is not RunState.RUNNING:
            samples.clear()
        elif not samples or now - samples[-1][0] >= EVERY_S:
            samples.append((now, *counts(run)))
            while len(samples) > 2 and now - samples[1][0] >= WINDOW_S:
                samples.popleft()


def counts(run: Run) -> tuple[int, int]:
    """(items with a result, units out) of its root log."""
    return sum(run.root.counts), run.root.units_out


def rates(state: State, run: Run) -> tuple[float, float]:
    """Items and units out a second, over the window or since the run went on."""
    if not run.samples or run.state is not RunState.RUNNING:
        return 0.0, 0.0
    at, items, units = run.samples[0]
    seconds = state.now.mono - at
    if seconds < EVERY_S:
        return 0.0, 0.0
    items_now, units_now = counts(run)
    return (items_now - items) / seconds, (units_now - units) / seconds
