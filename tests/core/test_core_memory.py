"""What is over leaves memory: ended runs after a while, children with their parent. The ledger keeps it all."""

from __future__ import annotations

import gc

from core_world import FakeWorker, World
from rollout.model.item import ItemSpec, Key
from rollout.model.run import RunState
from rollout_coordinator.core.events import WorkerSpawn, WorkerWaiting


def remembering() -> World:
    """A world that forgets ended runs after five seconds, as a coordinator does after a minute."""
    return World(ended_on_disk=True, keep_ended=5.0)


def gauges(w: World) -> tuple[float, float]:
    found = w.core.gauges()
    return found["runs"], found["logs"]


def test_ended_runs_leave_memory_and_can_go_on() -> None:
    w = remembering()
    a = w.worker("A", credit=8)
    for n in range(4):
        w.open(f"R{n}")
        w.submit(4, run_id=f"R{n}")
        w.seal(4, run_id=f"R{n}")
        w.drain_all()
        assert w.view(f"R{n}").state is RunState.COMPLETED
    w.open("R4")
    w.submit(4, run_id="R4")
    held = min(a.held)
    a.finish(held)
    w.verb("kill", run_id="R4")
    assert gauges(w) == (5, 5)
    w.pass_time(6.0)
    assert gauges(w) == (0, 0)
    before = w.core.gauges()["items_stale_total"]
    a.send({held: 1})  # a late word about a run that nobody remembers
    assert w.core.gauges()["items_stale_total"] == before + 1 and not w.closed
    assert w.open("R0").state is RunState.COMPLETED, "found again in the ledger"
    assert gauges(w) == (1, 1)
    w.pass_time(6.0)
    assert gauges(w) == (0, 0)
    assert w.verb("continue", run_id="R4").state is RunState.RUNNING and len(a.held) == 3
    w.seal(4, run_id="R4")
    w.drain_all()
    assert w.view("R4").state is RunState.COMPLETED and w.view("R4").done == 4


def test_workers_leave_memory_when_they_are_long_gone() -> None:
    w = World(orphan_grace=1.0)
    w.open()
    w.submit(8)
    for name in "ABCD":
        worker = w.worker(name)
        assert worker.held, "what it holds is taken back when it is silent"
        worker.silent = True
        w.pass_time(7.0)
    w.pass_time(12.0)
    state = w.core._state  # pyright: ignore[reportPrivateUsage]
    assert not state.workers and not state.sessions and not state.ready


def family(w: World, a: FakeWorker, seq: int, children: int) -> None:
    """Item `seq` spawns children, reads them and is done."""
    parent = Key(w.root(), seq)
    attempt = a.held[parent]
    a.start((parent.log, parent.seq))
    ids = [b"%032d" % (seq * 100 + n) for n in range(children)]
    w.step(WorkerSpawn(a.session, parent, attempt, 0, ids, [b"c"] * children, (ItemSpec(),), None, True))
    w.step(WorkerWaiting(a.session, parent, attempt, 0))
    a.finish(*(key for key in list(a.held) if key[0] != parent.log))
    a.finish((parent.log, parent.seq))


def test_children_leave_memory_with_their_parent_and_the_tallies_stay() -> None:
    w = remembering()
    a = w.worker("A", credit=4)
    w.open()
    for seq in range(6):
        w.submit(1, first=seq)
        family(w, a, seq, 2)
        assert gauges(w) == (1, 1), "the run's own log is left"
    view = w.view()
    assert (view.done, view.attempts) == (6, 18)
    assert [row.cursor for row in w.ledger.logs.values() if row.parent_log] == [2] * 6, "their last rows were written"
    w.restart()
    a.hello()
    assert gauges(w) == (1, 1) and w.view().attempts == 18, "a new leader counts the same"
    w.seal(6)
    assert w.view().state is RunState.COMPLETED


def test_children_of_a_killed_run_count_and_go_on() -> None:
    w = remembering()
    a = w.worker("A", credit=4)
    w.open()
    w.submit(1)
    parent = Key(w.root(), 0)
    a.start((parent.log, parent.seq))
    w.step(WorkerSpawn(a.session, parent, 1, 0, [b"%032d" % 1, b"%032d" % 2], [b"c"] * 2, (ItemSpec(),), None, True))
    w.step(WorkerWaiting(a.session, parent, 1, 0))
    a.finish(min(key for key in a.held if key[0] != parent.log))
    w.verb("kill")
    killed = w.view().attempts
    row = w.ledger.logs[parent.log]
    assert row.attempts == killed == 2, "the root's row alone tells the run's tallies: views of ended runs read it"
    w.pass_time(6.0)
    assert gauges(w) == (0, 0)
    assert w.verb("continue").state is RunState.RUNNING and gauges(w) == (1, 2)
    family_again = a.held[parent]
    a.start((parent.log, parent.seq))
    ids = [b"%032d" % 1, b"%032d" % 2]
    w.step(WorkerSpawn(a.session, parent, family_again, 0, ids, [b"c"] * 2, (ItemSpec(),), None, True))
    w.step(WorkerWaiting(a.session, parent, family_again, 0))
    a.finish(*(key for key in list(a.held) if key[0] != parent.log))
    a.finish((parent.log, parent.seq))
    w.seal(1)
    assert w.view().state is RunState.COMPLETED and gauges(w) == (1, 1)


def test_what_a_worker_fits_is_not_taken_from_a_run_that_is_forgotten() -> None:
    """Requirements were once known by their address in memory, which those of a later run may get again."""
    w = remembering()
    a = w.worker("A", credit=20, labels=(("kind", "x"),))
    for turn, kind in enumerate("yx" * 5):
        for n in range(10):
            run_id = f"{turn}-{n}"
            w.open(run_id)
            w.submit(1, run_id, specs=ItemSpec(require_labels=(("kind", kind),)))
        assert len(a.held) == (10 if kind == "x" else 0)
        a.finish()
        for n in range(10):
            w.verb("kill", f"{turn}-{n}")
        w.pass_time(6.0)
        gc.collect()
