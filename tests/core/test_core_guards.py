"""Each check of the core by itself, where the scenarios do not depend on it alone: results, sessions, liveness."""

from __future__ import annotations

from typing import Any

from core_world import World
from rollout.model.item import Failure, ItemSpec, Key
from rollout.model.run import Lane, RunState
from rollout_coordinator.core import step as st
from rollout_coordinator.core.events import (
    Keys,
    ResultGroup,
    RunDelete,
    SubmitItems,
    Tick,
    WorkerBeat,
    WorkerConfirm,
    WorkerGone,
    WorkerReleased,
    WorkerResults,
    WorkerSpawn,
    WorkerStarted,
    WorkerWaiting,
)


def tried_again(**world: Any) -> tuple[World, Any, tuple[int, int]]:
    """A worker that gave an item back and got it again: attempt 2."""
    w = World(**world)
    a = w.worker("A")
    w.open()
    w.submit(1)
    key = (w.root(), 0)
    a.release(key)
    assert a.held == {key: 2}
    return w, a, key


def test_a_late_result_of_an_attempt_given_back_is_stale() -> None:
    w, a, (log, seq) = tried_again()
    w.step(WorkerResults(a.session, [ResultGroup(log, [seq], [1], None, [b"old"], {}, [1])]))
    assert (w.view().stale, w.view().done, w.view().in_flight) == (1, 0, 1)


def test_a_late_start_of_an_attempt_given_back_is_ignored() -> None:
    w, a, (log, seq) = tried_again()
    w.step(WorkerStarted(a.session, [Keys(log, [seq], [1])]))
    assert w.view().running == 0


def test_a_late_release_of_an_attempt_given_back_is_ignored() -> None:
    w, a, (log, seq) = tried_again()
    w.step(WorkerReleased(a.session, [Keys(log, [seq], [1])], "drain"))
    w.step(WorkerConfirm(a.session, 9, [Keys(log, [seq], [1])], []))
    assert a.held == {(log, seq): 2} and list(w.ledger.attempts) == [(log, seq, 1)]


def test_a_hello_with_an_old_attempt_does_not_keep_the_present_one() -> None:
    w, a, key = tried_again()
    a.held[key] = 1  # both the cancellation and the new assignment were lost with the stream
    a.hello()
    assert a.held == {key: 3}
    a.finish()
    w.seal(1)
    assert w.view().state is RunState.COMPLETED


def test_only_the_holder_starts_ends_or_gives_back_an_attempt() -> None:
    w = World()
    a, b = w.worker("A"), w.worker("B", credit=0)
    w.open()
    w.submit(1)
    log = w.root()
    keys = [Keys(log, [0], [1])]
    w.step(WorkerStarted(b.session, keys))
    assert w.view().running == 0
    w.step(WorkerReleased(b.session, keys, "drain"))
    assert a.held == {(log, 0): 1} and not w.ledger.attempts
    w.step(WorkerResults(b.session, [ResultGroup(log, [0], [1], None, [b"b"], {}, [1])]))
    assert (w.view().done, w.view().stale) == (0, 1)


def test_a_result_told_twice_counts_once() -> None:
    """003, edge case 10: the key is (log, seq, attempt), in one message and in the next."""
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(2)
    log = w.root()
    group = ResultGroup(log, [0, 0, 1], [1, 1, 1], None, [b"x", b"y", b"z"], {}, [1] * 3)
    w.step(WorkerResults(a.session, [group]))
    assert (w.view().done, w.view().stale) == (2, 1)
    w.step(WorkerResults(a.session, [group]))
    assert (w.view().done, w.view().stale) == (2, 4)
    assert w.ledger.results[log][0][2] == b"x"


def test_an_attempt_that_was_never_given_quarantines_and_costs_nobody_else() -> None:
    """003, edge case 2. The run needs not fail: nothing of that worker counts any more."""
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(3)
    a.send({(w.root(), 0): 5})
    assert w.events("worker_quarantined")
    b = w.worker("B")
    assert len(b.held) == 3
    w.seal(3)
    b.finish()
    assert w.view().state is RunState.COMPLETED


def test_a_failure_that_no_retry_can_help_is_final() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(1, specs=ItemSpec(max_attempts=9))
    a.finish(failure=Failure("bad_row", "no prompt", retryable=False))
    assert w.view().failed == 1


def test_what_must_not_run_twice_does_not_after_a_loss() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(1, specs=ItemSpec(fail_on_worker_lost=True))
    a.start()
    a.alive = False
    b = w.worker("B")
    w.pass_time(7.0)
    assert not b.held and w.ledger.results[w.root()][0][3].code == "worker_lost"


def test_what_must_not_run_twice_does_not_after_a_hello_without_it() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(1, specs=ItemSpec(fail_on_worker_lost=True))
    a.start()
    a.held.clear()
    a.started.clear()
    a.hello()
    assert not a.held and w.view().failed == 1


def test_what_must_not_run_twice_may_have_begun_under_the_last_leader() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(1, specs=ItemSpec(fail_on_worker_lost=True))
    a.alive = False
    w.restart()
    b = w.worker("B")
    w.pass_time(7.0)
    assert not b.held and w.view().failed == 1


def test_a_pipelined_pair_given_back_in_one_message_ends_once_each() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(2, specs=ItemSpec(chain="c", pipelined=True))
    assert len(a.held) == 2
    a.release(*list(a.held))
    assert len(w.ledger.attempts) == 2


def test_a_successor_whose_predecessor_never_arrived_is_cancelled_after_the_welcome() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(2, specs=ItemSpec(chain="c", pipelined=True))
    log = w.root()
    del a.held[log, 0]
    step = a.hello()
    told = [type(send) for send in step.sends if getattr(send, "session", "") == a.session]
    assert told[:2] == [st.SendWelcome, st.SendCancel]
    welcome = next(send for send in step.sends if isinstance(send, st.SendWelcome))
    assert (welcome.keep, welcome.drop) == ([], [Keys(log, [1], [1])])
    a.finish((log, 0))
    a.finish((log, 1))
    w.seal(2)
    assert w.view().state is RunState.COMPLETED


def test_frames_of_a_session_that_is_gone_are_ignored() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(2)
    old = a.session
    a.hello()
    before = dict(a.held)
    w.step(WorkerReleased(old, a.keys(a.held), "drain"))
    w.step(WorkerGone(old))
    assert a.held == before and not w.ledger.attempts
    w.submit(1)
    assert len(a.held) == 3, "its new session is still open"


def test_a_coordinator_that_was_stopped_fails_nobody() -> None:
    w = World()
    w.worker("A")
    w.pass_time(1.0)
    w.mono += 60
    w.wall += 60_000
    w.step(Tick())
    assert not w.events("worker_failed")


def test_a_beat_that_has_arrived_is_read_before_the_deadline_is_looked_at() -> None:
    w = World()
    w.worker("A")
    w.pass_time(6.0, beat=False)
    w.mono += 0.25
    w.step(WorkerBeat("A", "host-A", w.mono), Tick())
    assert not w.events("worker_failed")


def test_a_beat_handled_late_does_not_shorten_a_deadline() -> None:
    w = World()
    w.worker("A")
    w.step(WorkerBeat("A", "host-A", w.mono - 4.0))
    w.pass_time(4.5, beat=False)
    assert not w.events("worker_failed")


def test_a_worker_that_fails_again_is_reported_once() -> None:
    w = World()
    a = w.worker("A")
    w.pass_time(7.0, beat=False)
    a.hello()
    w.pass_time(7.0, beat=False)
    assert len(w.events("worker_failed")) == 1


def test_a_worker_that_was_away_hears_of_the_pause() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(2)
    w.step(WorkerGone(a.session))
    a.session = ""
    w.verb("pause")
    assert not a.pauses
    a.hello()
    assert a.pauses == ["R"]


def test_a_verb_that_the_state_does_not_allow_is_answered() -> None:
    w = World()
    w.open()
    w.verb("pause")
    refused = w.ask(RunDelete, "R")
    assert refused.error is not None and "kill it first" in refused.error.message
    assert w.view().state is RunState.PAUSED


def test_killed_work_stops_and_its_late_results_count_for_nothing() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(9)
    keys = dict(a.held)
    w.verb("kill")
    assert not a.held and w.view().in_flight == 0
    a.send(keys)
    assert (w.view().done, w.view().stale) == (0, 4) and not a.unacked
    w.pass_time(1.0)
    assert not a.held


def test_a_deletion_leaves_no_row_of_its_own_step() -> None:
    w = World()
    w.worker("A")
    w.open()
    w.requests += 1
    items = SubmitItems(w.requests, "R", 0, [b"%032d" % 0], [b"p"], (ItemSpec(),))
    step = w.step(items, RunDelete(999, "R", True))
    assert isinstance(step, st.Step)
    assert not (step.writes.items or step.writes.attempts or step.writes.specs or step.writes.results)


def test_a_lane_keeps_its_cap_when_a_parent_goes_on() -> None:
    w = World()
    a = w.worker("A", credit=8)
    w.open(lanes=(Lane("p", 1),))
    w.submit(2, specs=ItemSpec(lane="p"))
    parent = Key(w.root(), 0)
    w.step(WorkerSpawn(a.session, parent, 1, 0, [b"c" * 32], [b"x"], (ItemSpec(),), None, True))
    w.step(WorkerWaiting(a.session, parent, 1, 0))
    assert (w.root(), 1) in a.held, "the waiting parent's place is free"
    (child,) = [k for k in a.held if k[0] != w.root()]
    a.finish(child)
    assert not a.resumed, "the other has its place now"
    a.finish((w.root(), 1))
    assert a.resumed == [parent]


def test_the_cap_of_a_run_counts_parents_that_wait_and_leaves_room_for_their_children() -> None:
    w = World()
    a = w.worker("A", credit=8)
    w.open(max_in_flight=2)
    w.submit(4)
    parents = [Key(w.root(), seq) for seq in (0, 1)]
    for parent in parents:
        w.step(WorkerSpawn(a.session, parent, 1, 0, [b"c" * 32], [b"x"], (ItemSpec(),), None, True))
        w.step(WorkerWaiting(a.session, parent, 1, 0))
    assert [key for key in a.held if key[0] == w.root()] == parents, "others would hold what these wait to go on with"
    for child in [key for key in a.held if key[0] != w.root()]:
        a.finish(child)
    assert sorted(a.resumed) == parents
    a.finish(parents[0])
    assert (w.root(), 2) in a.held and (w.root(), 3) not in a.held
