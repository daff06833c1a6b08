"""Each check of the worker's session by itself, where the scenarios do not depend on it alone."""

from __future__ import annotations

import time

import pytest
from rollout.model.errors import ProtocolError
from rollout.model.item import Failure, ItemSpec
from rollout.wire.v1 import common_pb2, work_pb2
from rollout_worker import session_events as ev
from rollout_worker.attempts import AttemptKey, Finished, State, group_to_wire
from rollout_worker.processes import guard
from rollout_worker.session import GUARD_LATER_S, Phase
from session_world import LOG, RUN, Worker, delivered, keys, of, seqs

OTHER = "01ARZ3NDEKTSV4RRFFQ69G5FAW"


def test_a_new_stream_sends_only_what_it_is_asked_for() -> None:
    w = Worker()
    w.assign([0])
    w.ready()
    w.end(1, 0, data=b"r")  # finished, and its frame not yet sent
    w.do(ev.StreamDown())
    w.up()
    w.down(welcome=work_pb2.Welcome(accepted=keys(0)))  # it had reached the ledger by another stream
    assert w.flush() == [] and not w.session.unacknowledged


def test_an_assignment_told_twice_runs_once() -> None:
    w = Worker(slots=2)
    w.assign([0])
    w.assign([0])
    assert delivered(w.ready()) == {1: [0]}
    w.end(1, 0, data=b"r")
    assert not delivered(w.assign([0])) and not w.session.held


def test_what_waits_in_a_process_is_given_up_only_when_that_lets_it_go() -> None:
    w = Worker()
    w.assign([0])
    w.ready()
    w.session.place.children[1].depth = 8
    w.assign([1, 2])
    w.flush()
    actions = w.down(revoke=work_pb2.Revoke(revoke_id=3, keys=keys(1, 2)))
    assert not [f for f in w.sent(actions) if f.HasField("confirm")]
    (recall,) = of(actions, ev.RecallIn)
    assert [k.seq for k in recall.keys] == [1, 2]
    sent = w.sent(w.do(ev.ChildReturned(1, [AttemptKey(LOG, 2, 1)])))  # it has begun the other meanwhile
    (confirm,) = [f.confirm for f in sent if f.HasField("confirm")]
    assert (seqs(confirm.given_up), seqs(confirm.kept)) == ([2], [1])


def fenced(slots: int = 1) -> Worker:
    """It killed an exclusive attempt, whose process has not ended; another waits behind it."""
    w = Worker(slots)
    w.assign([0, 1], ItemSpec(exclusive=True))
    w.ready()
    w.tick(4.1)
    assert w.session.phase is Phase.FENCED
    w.do(ev.StreamDown())
    return w


@pytest.mark.parametrize("welcomed", [True, False], ids=["after Welcome", "before"])
def test_an_exclusive_attempt_that_the_fence_killed_is_held_until_its_process_has_ended(welcomed: bool) -> None:
    w = fenced()
    hello = w.up()
    assert (seqs(hello.held), seqs(hello.held_started)) == ([0, 1], [0])
    if welcomed:
        w.down(welcome=work_pb2.Welcome(keep=keys(0, 1)))
        assert w.session.phase is Phase.READY and w.flush() == []
        w.tick(3.0)
    w.do(ev.ChildEnded(1, "signal SIGKILL"))
    assert not w.session.wants_flush or welcomed
    if not welcomed:
        w.down(welcome=work_pb2.Welcome(keep=keys(0, 1)))
    (told,) = [f.released for f in w.flush() if f.HasField("released")]
    assert (seqs(told.keys), told.reason) == ([0], "self_fence")
    assert [key.seq for key in w.session.held] == [1], "the rest of its work goes on"


def test_one_whose_process_ended_between_two_streams_is_not_in_the_next_hello() -> None:
    w = fenced()
    w.do(ev.ChildEnded(1, "signal SIGKILL"))
    assert seqs(w.up().held) == [1]
    w.down(welcome=work_pb2.Welcome(keep=keys(1)))
    assert not [f for f in w.flush() if f.HasField("released")]


def test_one_that_the_coordinator_drops_meanwhile_is_not_given_back() -> None:
    w = fenced(slots=2)
    w.do(ev.StreamDown())
    w.up()
    actions = w.down(welcome=work_pb2.Welcome(drop=keys(0, 1)))
    assert not of(actions, ev.CancelIn), "its process is being killed"
    assert set(w.session.held) == {AttemptKey(LOG, 0, 1), AttemptKey(LOG, 1, 1)}
    assert seqs(w.up().held) == [], "they are the coordinator's, and yet they run"
    w.down(welcome=work_pb2.Welcome())
    w.do(ev.ChildEnded(1, "signal SIGKILL"))
    w.do(ev.ChildEnded(2, "signal SIGKILL"))
    assert not w.session.held and w.flush() == []


def test_a_parent_that_the_fence_killed_makes_no_children_on_the_next_stream() -> None:
    w = Worker()
    w.assign([0], ItemSpec(exclusive=True))
    w.ready()
    w.do(ev.ChildSpawned(1, work_pb2.Spawn(log=LOG, seq=0, attempt=1, seal=True)))
    w.do(ev.ChildWaits(1, work_pb2.Waiting(log=LOG, seq=0, attempt=1)))
    w.tick(4.1)
    w.do(ev.StreamDown())
    assert seqs(w.up().held_started) == [0]
    assert w.sent(w.down(welcome=work_pb2.Welcome(keep=keys(0)))) == []


def test_the_end_of_an_exclusive_attempt_is_told_though_its_run_has_ended() -> None:
    w = Worker()
    w.assign([0, 1, 2, 3], ItemSpec(exclusive=True))
    w.assign([4])
    w.ready()
    assert delivered(w.end(1, 0)) == {1: [1, 2]}  # its result has not been sent
    actions = w.down(ended=work_pb2.RunEnded(run_id=RUN, state="killed"))
    assert [key.seq for action in of(actions, ev.CancelIn) for key in action.keys] == [1, 2]
    w.end(1, 1, 2, failure=Failure("cancelled", "cancelled"))
    told = [f.released for f in w.flush() if f.HasField("released")]
    assert sorted(seq for one in told for seq in seqs(one.keys)) == [0, 1, 2, 3]
    assert {one.reason for one in told} == {"cancel"}
    assert not w.session.held and not w.session.unacknowledged


def test_a_late_acceptance_counts_from_the_send_of_its_result() -> None:
    w = Worker()
    w.assign([0])
    w.ready()
    w.end(1, 0)
    w.flush()
    w.now += 3.5
    w.down(accepted=work_pb2.Accepted(accepted=keys(0)))
    w.tick(0.6)
    assert w.session.phase is Phase.FENCED


def test_a_late_answer_does_not_move_the_fence_back() -> None:
    w = Worker()
    w.now += 3.9
    w.do(ev.Acknowledged(w.now))
    w.do(ev.Acknowledged(w.now - 3.8))
    w.tick(0.5)
    assert w.session.phase is Phase.READY


def test_the_fence_counts_the_time_that_a_machine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(time, "CLOCK_BOOTTIME"):
        pytest.skip("this system has no such clock")
    real = time.clock_gettime
    asleep = 3600.0
    monkeypatch.setattr(
        guard.time, "clock_gettime", lambda which: real(which) + (asleep if which == time.CLOCK_BOOTTIME else 0.0)
    )
    assert guard.clock() >= time.monotonic() + asleep - 1.0


def test_an_assignment_that_crosses_a_drain_goes_back() -> None:
    w = Worker()
    w.assign([0])
    w.ready()
    w.do(ev.Drain("SIGTERM", 30))
    w.flush()
    released = [f.released for f in w.sent(w.assign([1])) if f.HasField("released")]
    assert [(seqs(r.keys), r.reason) for r in released] == [([1], "drain")]
    assert [k.seq for k in w.session.held] == [0]


def test_what_a_process_says_of_another_attempt_is_ignored() -> None:
    w = Worker()
    w.assign([0])
    w.ready()
    w.do(ev.ChildResults(1, group_to_wire(LOG, [Finished(LOG, 0, 9, "", b"old")])))
    assert not delivered(w.do(ev.ChildReturned(1, [AttemptKey(LOG, 0, 9)])))
    assert not w.session.unacknowledged
    assert [h.state for h in w.session.held.values()] == [State.RUNNING]


def test_a_run_is_remembered_while_it_has_work_or_its_stream_lasts() -> None:
    w = Worker(slots=2)
    w.assign([0], run=RUN)
    w.assign([1], run=OTHER, name="other")
    w.ready()
    w.end(1, 0)
    w.flush()
    w.down(accepted=work_pb2.Accepted(accepted=keys(0)))
    assert not w.session.place.plans, "nothing waits for a process"
    w.do(ev.StreamDown())  # it may end before the next one is there, and nobody will say so then
    w.up()
    w.down(welcome=work_pb2.Welcome(keep=keys(1)))
    w.assign([2], run=OTHER, workload="", name="other")
    with pytest.raises(ProtocolError, match="never sent"):
        w.assign([3], run=RUN, workload="")
    assert [k.seq for k in w.session.held] == [1, 2]


def test_a_large_result_is_told_only_when_it_is_stored() -> None:
    w = Worker()
    w.assign([0])
    w.ready()
    w.flush()
    w.end(1, 0, data=b"x" * 5000)
    assert w.flush() == [] and not w.session.unacknowledged
    w.do(ev.Stored(AttemptKey(LOG, 0, 1), b"slice"))
    (frame,) = w.flush()
    assert frame.results.groups[0].data == b"slice"


def test_an_attempt_that_is_being_stopped_makes_no_children() -> None:
    w = Worker()
    w.assign([0])
    w.ready()
    w.down(cancel=work_pb2.Cancel(keys=keys(0), reason="x"))
    actions = w.do(ev.ChildSpawned(1, work_pb2.Spawn(log=LOG, seq=0, attempt=1, seal=True)))
    assert not [f for f in w.sent(actions) if f.HasField("spawn")]


def test_an_attempt_changes_state_as_its_table_says() -> None:
    w = Worker()
    w.assign([0])
    (held,) = w.session.held.values()
    with pytest.raises(KeyError):
        held.move("resume")
    assert held.state is State.QUEUED


def test_a_failure_to_store_is_told_as_one() -> None:
    w = Worker()
    w.assign([0])
    w.ready()
    w.end(1, 0, data=b"x" * 5000)
    w.do(ev.StoreFailed(AttemptKey(LOG, 0, 1), Failure("object_store", "full", True)))
    (result,) = w.session.unacknowledged.values()
    assert result.failure == Failure("object_store", "full", True)


def test_a_message_without_keys_for_its_attempts_is_a_fault() -> None:
    w = Worker()
    with pytest.raises(ProtocolError):
        w.down(revoke=work_pb2.Revoke(revoke_id=1, keys=[common_pb2.AttemptKeys(log=1, seq=[1], attempt=[])]))


def test_a_process_is_killed_though_its_daemon_stands_still_while_it_runs_an_exclusive_attempt() -> None:
    w = Worker()
    w.assign([0], ItemSpec(exclusive=True))
    first = w.ready()
    assert [type(a) for a in first if isinstance(a, ev.KillAt | ev.Deliver)] == [ev.KillAt, ev.Deliver]
    assert of(first, ev.KillAt) == [ev.KillAt(1, w.now + 4.0 + GUARD_LATER_S)]
    assert not of(w.tick(0.5), ev.KillAt), "nobody has answered meanwhile"
    sent = w.now
    w.do(ev.Acknowledged(sent))
    assert of(w.tick(0.5), ev.KillAt) == [ev.KillAt(1, sent + 4.0 + GUARD_LATER_S)], "from the send"
    w.end(1, 0)
    assert of(w.tick(), ev.KillAt) == [ev.KillAt(1, 0.0)]
    w.assign([1])
    w.do(ev.Acknowledged(w.now))
    assert not of(w.tick(0.5), ev.KillAt), "what is not exclusive runs on"


@pytest.mark.parametrize("answered", [True, False], ids=["answered meanwhile", "fenced"])
def test_what_was_killed_while_the_daemon_stood_still_is_given_back(answered: bool) -> None:
    w = Worker()
    w.assign([0], ItemSpec(exclusive=True))
    w.ready()
    w.flush()
    w.now += 4.2
    if answered:
        w.do(ev.Acknowledged(w.now - 1.0))
    actions = w.do(ev.ChildEnded(1, "signal SIGKILL"))
    assert not of(actions, ev.Emit), "no crash of its own"
    assert not w.session.held and not w.session.unacknowledged
    if answered:
        (told,) = [f.released for f in w.flush() if f.HasField("released")]
        assert (seqs(told.keys), told.reason) == ([0], "self_fence")
    else:
        w.tick()
        w.do(ev.StreamDown())
        assert seqs(w.up().held) == []


def test_a_process_that_crashes_before_its_time_is_a_crash() -> None:
    w = Worker()
    w.assign([0], ItemSpec(exclusive=True))
    w.ready()
    w.now += 1.0
    w.do(ev.ChildEnded(1, "signal SIGSEGV"))
    (result,) = w.session.unacknowledged.values()
    assert result.failure is not None and result.failure.code == "executor_crashed"


def test_one_that_timed_out_before_the_fence_has_timed_out() -> None:
    w = Worker()
    w.assign([0], ItemSpec(exclusive=True, timeout_ms=2000))
    w.ready()
    assert of(w.tick(2.1), ev.CancelIn)
    w.tick(2.1)
    assert w.session.phase is Phase.FENCED
    w.do(ev.ChildEnded(1, "signal SIGKILL"))
    (result,) = w.session.unacknowledged.values()
    assert result.failure is not None and result.failure.code == "timeout"
