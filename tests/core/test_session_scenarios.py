"""The worker's session, event by event, in virtual time and without an event loop: from assignment to acceptance."""

from __future__ import annotations

import json

import pytest
from rollout.model.errors import ProtocolError
from rollout.model.item import Failure, ItemSpec
from rollout.wire.v1 import common_pb2, work_pb2
from rollout_worker import session_events as ev
from rollout_worker.attempts import TABLE, AttemptKey, State
from session_world import LOG, RUN, Worker, delivered, keys, of, seqs


def test_an_item_from_assignment_to_acceptance() -> None:
    w = Worker()
    assert len(of(w.assign([0]), ev.StartChild)) == 1
    assert delivered(w.ready()) == {1: [0]}
    assert seqs(w.flush()[0].started.keys) == [0]
    w.end(1, 0, data=b"r")
    (frame,) = w.flush()
    assert (frame.results.groups[0].data, list(frame.results.groups[0].seq)) == (b"r", [0])
    assert set(w.session.unacknowledged) == {AttemptKey(LOG, 0, 1)}
    w.down(accepted=work_pb2.Accepted(accepted=keys(0)))
    assert not w.session.unacknowledged and not w.session.held


def test_a_start_and_its_end_in_one_flush_send_only_the_result() -> None:
    w = Worker()
    w.assign([0])
    w.ready()
    w.end(1, 0)
    assert [f.WhichOneof("body") for f in w.flush()] == ["results"]


def test_hello_lists_what_is_held_and_results_wait_for_welcome() -> None:
    w = Worker()
    w.assign([0, 1, 2])
    w.ready()
    w.end(1, 0, data=b"zero")
    w.flush()
    w.do(ev.StreamDown())
    w.end(1, 1, data=b"one")
    hello = w.up()
    assert seqs(hello.held) == [2] and seqs(hello.held_started) == [2]
    assert sorted(seqs(hello.unacknowledged)) == [0, 1]
    assert w.flush() == []
    w.end(1, 2, data=b"two")  # between Hello and Welcome: told as held, so it is sent once kept
    w.down(welcome=work_pb2.Welcome(keep=keys(2), accepted=keys(0), resend=keys(1)))
    (frame,) = w.flush()
    assert sorted(frame.results.groups[0].seq) == [1, 2]
    assert AttemptKey(LOG, 0, 1) not in w.session.unacknowledged


def test_welcome_drops_what_was_given_to_others() -> None:
    w = Worker()
    w.assign([0, 1])
    w.ready()
    w.do(ev.StreamDown())
    w.up()
    actions = w.down(welcome=work_pb2.Welcome(drop=keys(0, 1)))
    assert [a.keys for a in of(actions, ev.CancelIn)] == [[AttemptKey(LOG, 0, 1)]]
    assert list(w.session.held) == [AttemptKey(LOG, 0, 1)]  # until its process lets go
    w.end(1, 0, data=b"too late")
    assert not w.session.held and not w.session.unacknowledged and w.flush() == []


def test_only_unstarted_attempts_are_given_up_to_a_thief() -> None:
    w = Worker()
    w.assign([0, 1, 2])
    w.ready()
    sent = w.sent(w.down(revoke=work_pb2.Revoke(revoke_id=7, keys=keys(0, 1, 2, 9))))
    assert [f.WhichOneof("body") for f in sent] == ["started", "confirm"]
    confirm = sent[1].confirm
    assert (confirm.revoke_id, seqs(confirm.kept), seqs(confirm.given_up)) == (7, [0], [1, 2, 9])
    assert delivered(w.end(1, 0)) == {}


def test_a_revoked_result_that_is_not_acknowledged_is_kept() -> None:
    w = Worker()
    w.assign([0])
    w.ready()
    w.end(1, 0)
    sent = w.sent(w.down(revoke=work_pb2.Revoke(revoke_id=1, keys=keys(0))))
    assert seqs(sent[-1].confirm.kept) == [0]


def test_pause_releases_the_unstarted_and_lets_the_others_finish() -> None:
    """003, edge case 5: the worker's side."""
    w = Worker()
    w.assign([0, 1])
    w.ready()
    w.down(pause=work_pb2.Pause(run_id=RUN, deadline_ms=1000))
    released = [f.released for f in w.flush() if f.WhichOneof("body") == "released"]
    assert [(seqs(r.keys), r.reason) for r in released] == [([1], "pause")]
    w.end(1, 0)
    assert w.flush()[-1].WhichOneof("body") == "results"


def test_cancel_reaches_the_process_which_is_killed_if_it_does_not_let_go() -> None:
    w = Worker(cancel_grace_s=5.0)
    w.assign([0])
    w.ready()
    assert of(w.down(cancel=work_pb2.Cancel(keys=keys(0), reason="x")), ev.CancelIn)
    assert not of(w.tick(3), ev.StopChild)
    w.do(ev.Acknowledged(w.now))
    assert [a.kill for a in of(w.tick(2.1), ev.StopChild)] == [True]
    w.do(ev.ChildEnded(1, "signal SIGKILL"))
    (released,) = [f.released for f in w.flush() if f.WhichOneof("body") == "released"]
    assert released.reason == "cancel" and not w.session.held


def test_a_timeout_counts_from_the_start_and_is_reported_once_the_attempt_is_over() -> None:
    w = Worker(self_fence_s=100)
    w.assign([0, 1], ItemSpec(timeout_ms=1000))
    w.tick(5)  # the process is still starting
    w.ready()
    assert not of(w.tick(0.9), ev.CancelIn)
    assert of(w.tick(0.2), ev.CancelIn)
    assert not w.session.unacknowledged
    w.end(1, 0, failure=Failure("cancelled", "cancelled"))
    (result,) = w.session.unacknowledged.values()
    assert result.failure is not None and result.failure.code == "timeout"
    assert not of(w.tick(0.5), ev.CancelIn)  # the second began when the first ended


def test_large_inputs_and_results_travel_as_objects() -> None:
    w = Worker()
    ref = common_pb2.IndexedRef(index=0, ref=common_pb2.ObjectRef(object_id=bytes(32), offset=3, length=9))
    actions = w.assign([0], refs=[ref])
    assert len(of(actions, ev.Fetch)) == 1 and not of(actions, ev.StartChild)
    assert of(w.do(ev.Fetched([ev.Input(AttemptKey(LOG, 0, 1), b"payload", None)])), ev.StartChild)
    w.ready()
    assert len(of(w.end(1, 0, data=b"x" * 5000), ev.Store)) == 1
    assert seqs(w.flush()[0].started.keys) == [0]
    w.do(ev.Stored(AttemptKey(LOG, 0, 1), b"inline after all"))
    assert w.flush()[0].WhichOneof("body") == "results"


def test_frames_of_older_streams_are_ignored_and_odd_ones_are_faults() -> None:
    w = Worker()
    assert w.down(session="S0", welcome=work_pb2.Welcome()) == []
    with pytest.raises(ProtocolError, match="second Welcome"):
        w.down(welcome=work_pb2.Welcome())
    with pytest.raises(ProtocolError, match="without a body"):
        w.down()
    with pytest.raises(ProtocolError, match="never sent"):
        w.assign([0], workload="")
    with pytest.raises(ProtocolError, match="no run id"):
        w.assign([0], run="")
    with pytest.raises(ProtocolError, match="attempts"):
        w.down(cancel=work_pb2.Cancel(keys=[common_pb2.AttemptKeys(log=1, seq=[1, 2], attempt=[1])]))
    fresh = Worker(welcome=False)
    fresh.up()
    with pytest.raises(ProtocolError, match="before Welcome"):
        fresh.assign([0])


def test_the_table_of_attempts_has_a_way_out_of_every_state() -> None:
    for state in State:
        assert any(s is state for s, _ in TABLE), state
    assert {after for after in TABLE.values() if after} <= set(State)


def test_the_session_is_deterministic() -> None:
    def story() -> list[str]:
        w = Worker(slots=3)
        w.assign(range(20), ItemSpec(timeout_ms=500))
        w.ready()
        for seq in range(3):
            w.end(seq + 1, seq, data=json.dumps(seq).encode())
        w.tick(0.6)
        w.do(ev.ChildEnded(2, "x"))
        w.tick(5)
        w.flush()
        return [repr(a) for a in w.actions if not isinstance(a, ev.Deliver)]

    assert story() == story()
