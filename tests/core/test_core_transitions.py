"""Every row of the transition tables is one that the core really takes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import test_core_scenarios
import test_core_scenarios_children
import test_core_scenarios_dispatch
import test_core_scenarios_runs
from core_world import World
from hypothesis import settings as _settings
from rollout.model.errors import StateError
from rollout.model.item import Failure, ItemSpec, Outcome
from rollout.model.run import Lane, Policy, RunState
from rollout.model.worker import Credit, WorkerState
from rollout_coordinator.core.events import ItemCancel, WorkerBeat, WorkerCommand, WorkerConfirm, WorkerGoodbye
from rollout_coordinator.core.transitions import ITEM, LOG, REST, RUN, WORKER, RunPhase, Table
from test_core_guards_commit import scheduled

SCENARIOS = (test_core_scenarios, test_core_scenarios_runs, test_core_scenarios_dispatch, test_core_scenarios_children)

assert _settings  # the plugin is loaded for the whole directory


def test_an_unlisted_transition_raises() -> None:
    with pytest.raises(StateError, match="possible now: nothing"):
        RUN.move(RunPhase.COMPLETED, "continue")


def policies() -> None:
    w = World()
    a = w.worker("A", credit=8)
    w.open(lanes=(Lane("x"),), policies=(Policy("prune_lane", (("after", "2"),)),))
    w.submit(10, specs=ItemSpec(lane="x", max_attempts=1))
    keys = sorted(a.held)
    a.credit = Credit(1)
    a.hello()
    a.finish(keys[5])
    a.finish(*keys[:2], failure=Failure("bad", "x", False))
    assert w.view().skipped == 3, "one accepted ahead, two pending: closed at once"
    a.finish(*list(a.held), outcome=Outcome.CANCELLED)
    a.credit = Credit(20)
    a.hello()
    w.seal(10)
    view = w.view()
    assert (view.state, view.failed, view.skipped) == (RunState.COMPLETED, 2, 8)
    assert view.lanes[0].pruned_at == 1
    w.open("S", policies=(Policy("stop_early", (("failures", "1"),)),))
    w.submit(8, "S", specs=ItemSpec(max_attempts=1))
    a.finish(min(a.held), failure=Failure("bad", "x", False))
    assert w.view("S").state is RunState.FAILED and not a.held
    assert w.verb("continue", "S").state is RunState.RUNNING
    w.verb("kill", "S")
    w.open("G", policies=())
    w.submit(4, "G", specs=ItemSpec(group="g"))
    a.start(*list(a.held)[:2])
    a.finish(min(a.held))
    w.seal(4, "G")
    assert (w.view("G").done, w.view("G").cancelled) == (1, 3) and not a.held


def ending_while_stopped() -> None:
    for verb, cause in (("pause", "complete"), ("interrupt", "complete"), ("pause", "kill"), ("interrupt", "kill")):
        stopped(verb, cause)
    for verb in ("pause", "interrupt"):
        stopped(verb, "fail")
    for cause in ("complete", "fail", "kill"):
        paused_and_idle(cause)


def stopped(verb: str, cause: str) -> None:
    w = World()
    a = w.worker("A")
    fails = (Policy("stop_early", (("failures", "1"),)),) if cause == "fail" else ()
    w.open(pause_timeout_ms=500, policies=fails)
    w.submit(2, specs=ItemSpec(max_attempts=1))
    w.seal(2)
    w.verb("pause")
    if verb == "interrupt":
        w.pass_time(1.0)
        assert w.view().state is RunState.INTERRUPTED
    if cause == "kill":
        w.verb("kill")
    else:
        a.finish(failure=Failure("bad", "x", False) if cause == "fail" else None)
    assert w.view().state.value == {"complete": "completed", "kill": "killed", "fail": "failed"}[cause]


def paused_and_idle(cause: str) -> None:
    """The cursor may move without attempts: its next item is cancelled."""
    w = World()
    a = w.worker("A")
    w.open(policies=(Policy("stop_early", (("failures", "1"),)),) if cause == "fail" else ())
    w.submit(2, specs=ItemSpec(max_attempts=1))
    a.finish((w.root(), 1), failure=Failure("bad", "x", False) if cause == "fail" else None)
    w.verb("pause")
    assert w.verb("resume").state is RunState.RUNNING and not w.view().pausing
    w.verb("pause")
    assert w.view().pausing
    a.release((w.root(), 0), reason="pause")
    assert (w.view().state, w.view().pausing) == (RunState.PAUSED, False)
    if cause == "kill":
        w.verb("kill")
    else:
        w.seal(2)
        w.ask(ItemCancel, "R", (0,))
    assert w.view().state.value == {"complete": "completed", "kill": "killed", "fail": "failed"}[cause]


def limited() -> None:
    w = World()
    a = w.worker("A", credit=1)
    w.open(policies=(Policy("skip_rest", (("units_out", "1"),)),))
    w.submit(4)
    w.seal(4)
    a.finish(units=(0, 1))
    assert (w.view().state, w.view().skipped) == (RunState.COMPLETED, 3)


def worker_states() -> None:
    w = World()
    w.step(WorkerBeat("J", "host-J", w.mono))  # joins and is never heard of again
    d = w.worker("D", hello=False)
    d.draining = True
    w.step(WorkerBeat("D", "host-D", w.mono))
    d.hello()
    d.hello()
    d.draining = False
    d.hello()
    r = w.worker("R")
    assert w.ask(WorkerCommand, "R", "drain").error is None
    w.ask(WorkerCommand, "R", "drain")
    w.step(WorkerGoodbye(r.session, "drained"))
    b = w.worker("B")
    b.draining = True
    b.hello()
    w.step(WorkerGoodbye(b.session, "drained"))
    for name in ("E", "F"):
        lost = w.worker(name)
        lost.silent = True
        w.pass_time(7)
        lost.draining = name == "F"
        lost.hello()
    d.silent = True
    w.pass_time(7)
    bad = w.workers["F"]
    w.workers["F"].silent = False
    bad.hello()
    w.open()
    bad.send({(999, 0): 1})
    states = {v.incarnation: v.state for v in w.core.worker_views(w.now)}
    assert states["J"] is WorkerState.FAILED and states["F"] is WorkerState.QUARANTINED
    assert states["D"] is WorkerState.FAILED and states["R"] is WorkerState.GONE


def attempts_of_all_kinds() -> None:
    w = World(orphan_grace=1.0)
    a = w.worker("A", credit=10)
    w.open()
    w.submit(1, specs=ItemSpec(timeout_ms=500, max_attempts=1))
    w.submit(1, run_id="R")
    a.finish((w.root(), 1), failure=Failure("crash", "x", worker_lost=True))
    w.submit(4, specs=ItemSpec(fail_on_worker_lost=True))
    a.start((w.root(), 0))
    w.pass_time(3.0)
    assert w.view().failed == 1, "the backstop ended it"
    a.release(min(a.held))
    a.start()
    a.release(min(a.held))
    a.start()
    a.finish(min(a.held), failure=Failure("x", "x"))
    w.submit(3, specs=ItemSpec(chain="c", pipelined=True))
    held = sorted(k for k in a.held if k[1] >= 6)
    assert [k[1] for k in held] == [6, 7], "the successor is pipelined"
    a.start(held[1])
    a.release(held[0])  # k changed: k + 1 is dropped
    held = sorted(k for k in a.held if k[1] >= 6)
    a.release(held[0])
    w.submit(1)
    a.start((w.root(), 9))
    a.alive = False
    w.pass_time(7.0)


def given_up_after_its_start() -> None:
    w = World()
    a = w.worker("A", credit=20)
    w.open()
    w.submit(20)
    w.worker("B", credit=20)
    revoke = a.revokes[0]
    key = (revoke.keys[0].log, revoke.keys[0].seq[0])
    a.start(key)
    attempt = a.held.pop(key)
    w.step(WorkerConfirm(a.session, revoke.revoke_id, a.keys({key: attempt}), []))
    assert w.workers["B"].held == {key: 2}


def leaders_that_read_again() -> None:
    """What was accepted under the last leader is on its way, and the run ends or is stopped meanwhile."""
    for verbs in (("kill",), ("kill", "continue")):
        w, a, log = scheduled(Policy("stop_early", (("failures", "2"),)))
        a.finish((log, 1))
        w.hold_loads = True
        w.restart()
        a.hello()
        for verb in verbs:
            w.verb(verb)
        w.hold_loads = False
        w.pass_time(0.25)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, Any, str]]:
    taken: set[tuple[str, Any, str]] = set()
    move = Table.move

    def record(self: Table[Any], state: Any, cause: str) -> Any:
        after = move(self, state, cause)
        taken.add((self.name, state, cause))
        return after

    monkeypatch.setattr(Table, "move", record)
    return taken


def test_every_row_is_taken(seen: set[tuple[str, Any, str]]) -> None:
    for module in SCENARIOS:
        for name, test in vars(module).items():
            if name.startswith("test_") and not inspect.signature(test).parameters:
                test()
    for more in (policies, ending_while_stopped, worker_states, attempts_of_all_kinds, given_up_after_its_start):
        more()
    leaders_that_read_again()
    limited()
    every = {(t.name, state, cause) for t in (ITEM, RUN, LOG, REST, WORKER) for state, cause in t.rows}
    assert not {f"{n}: {s} --{c}-->" for n, s, c in every - seen}


def test_an_ended_run_of_an_earlier_leader_is_found_again() -> None:
    w = World(ended_on_disk=True)
    a = w.worker("A")
    w.open()
    w.submit(6)
    a.finish(min(a.held))
    w.verb("kill")
    w.restart()
    assert w.view() is None
    assert w.open().state is RunState.KILLED
    a.hello()
    assert w.verb("continue").state is RunState.RUNNING and len(a.held) == 4
    w.seal(6)
    w.drain_all()
    assert w.view().state is RunState.COMPLETED and w.view().done == 6
    w.restart()
    assert w.open().state is RunState.COMPLETED
