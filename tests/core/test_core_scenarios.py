"""Scenarios: submit, dispatch, results, commit."""

from __future__ import annotations

from core_world import World
from rollout.model.run import RunState


def test_a_run_completes() -> None:
    w = World()
    a, b = w.worker("A"), w.worker("B")
    w.open()
    w.submit(10)
    assert len(a.held) == 4 and len(b.held) == 4
    w.seal(10)
    w.drain_all()
    view = w.view()
    assert (view.state, view.cursor, view.done) == (RunState.COMPLETED, 10, 10)
    assert w.events("run_completed")
    assert not w.ledger.assignments
