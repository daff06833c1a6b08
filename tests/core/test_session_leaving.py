"""A worker that must stop: fenced, orphaned, drained."""

from __future__ import annotations

from rollout.model.item import Failure, ItemSpec
from rollout.wire.v1 import work_pb2
from rollout_worker import session_events as ev
from rollout_worker.session import Phase
from session_world import Worker, delivered, keys, of, seqs


def test_the_fence_stops_starts_and_results_and_kills_the_exclusive() -> None:
    w = Worker(slots=2)
    w.assign([0], ItemSpec(exclusive=True))
    w.assign([1, 2, 3])
    w.ready()
    w.do(ev.Acknowledged(w.now))
    assert w.tick(3.9) == []
    actions = w.tick(0.2)
    assert w.session.phase is Phase.FENCED
    assert [(a.child, a.kill) for a in of(actions, ev.StopChild)] == [(1, True)]
    w.do(ev.ChildEnded(1, "signal SIGKILL"))
    assert delivered(w.end(2, 1)) == {}
    assert w.flush() == []
    w.do(ev.StreamDown())
    hello = w.up()
    assert (seqs(hello.held), seqs(hello.unacknowledged)) == ([2, 3], [1])
    w.down(welcome=work_pb2.Welcome(keep=keys(2, 3), resend=keys(1)))
    assert w.session.phase is Phase.READY
    assert any(f.WhichOneof("body") == "results" for f in w.flush())


def test_the_fence_holds_what_waits_in_an_engine_until_it_is_lifted() -> None:
    w = Worker()
    w.assign([0, 1], workload="infer")
    w.ready(width=4)
    w.do(ev.Acknowledged(w.now))
    assert of(w.tick(4.1), ev.HoldIn) == [ev.HoldIn(1, True)]
    w.do(ev.StreamDown())
    w.up()
    assert of(w.down(welcome=work_pb2.Welcome(keep=keys(0, 1))), ev.HoldIn) == [ev.HoldIn(1, False)]


def test_the_fence_counts_from_the_send_of_what_was_acknowledged() -> None:
    w = Worker()
    w.now += 3
    w.do(ev.Acknowledged(w.now - 2.5))  # the answer took its time
    w.tick(1.4)
    assert w.session.phase is Phase.READY
    w.tick(0.2)
    assert w.session.phase is Phase.FENCED


def test_an_orphan_drops_everything_after_its_grace() -> None:
    w = Worker(orphan_grace_s=60)
    w.assign([0])
    w.ready()
    w.tick(4.1)
    assert not of(w.tick(59), ev.Exit)
    assert [a.how for a in of(w.tick(1.1), ev.Exit)] == ["orphaned"]
    assert w.tick(1) == []


def test_a_drain_releases_the_unstarted_finishes_the_rest_and_says_goodbye() -> None:
    w = Worker()
    w.assign([0, 1])
    w.ready()
    actions = w.do(ev.Drain("SIGTERM", 30))
    frames = w.sent(actions)
    assert [f.credit.items for f in frames if f.WhichOneof("body") == "credit"] == [0]
    assert [seqs(f.released.keys) for f in frames if f.WhichOneof("body") == "released"] == [[1]]
    assert not of(w.end(1, 0), ev.Exit)
    actions = w.down(accepted=work_pb2.Accepted(accepted=keys(0)))
    assert w.sent(actions)[-1].WhichOneof("body") == "goodbye"
    assert [a.how for a in of(actions, ev.Exit)] == ["drained"]


def test_a_drain_between_two_streams_is_told_on_the_next() -> None:
    """A certificate is renewed at that moment: without a Goodbye the worker would be declared failed."""
    w = Worker()
    w.tick()
    w.do(ev.StreamDown())
    assert not of(w.do(ev.Drain("SIGTERM", 30)), ev.Exit)
    assert not of(w.tick(0.5), ev.Exit)
    assert w.up().draining
    actions = w.down(welcome=work_pb2.Welcome(objects_addr="o:1"))
    assert [f.WhichOneof("body") for f in w.sent(actions)][-1] == "goodbye"
    assert [a.how for a in of(actions, ev.Exit)] == ["drained"]


def test_a_notice_between_hello_and_welcome_is_told_before_what_comes_of_it() -> None:
    w = Worker()
    w.assign([0])
    w.ready()
    w.do(ev.StreamDown())
    assert not w.up().draining
    w.do(ev.Drain("spot", 30, preempted=True))
    w.end(1, 0)
    frames = w.sent(w.down(welcome=work_pb2.Welcome(keep=keys(0))) + w.do(ev.Flush()))
    assert frames[0].leaving == work_pb2.Leaving(reason="spot", preempted=True)
    assert [f.WhichOneof("body") for f in frames][1:3] == ["results", "credit"]


def test_a_goodbye_whose_stream_broke_is_said_again() -> None:
    w = Worker()
    w.tick()
    assert of(w.do(ev.Drain("SIGTERM", 30)), ev.Exit)
    w.do(ev.StreamDown())
    again = w.sent(w.do(ev.StreamUp("S9")))
    assert [f.WhichOneof("body") for f in again] == ["hello", "goodbye"] and again[0].hello.draining
    assert not w.tick(1.0)


def test_a_notice_is_told_before_anything_that_comes_of_it() -> None:
    w = Worker()
    w.assign([0, 1])
    w.ready()
    w.flush()
    frames = w.sent(w.do(ev.Drain("SIGTERM", 30)))
    assert frames[0].WhichOneof("body") == "leaving" and not frames[0].leaving.preempted
    frames = w.sent(w.do(ev.Drain("spot", 15, True)))
    assert (frames[0].leaving.preempted, frames[0].leaving.reason) == (True, "spot")
    assert not [f for f in w.sent(w.do(ev.Drain("spot", 10, True))) if f.WhichOneof("body") == "leaving"]
    w.do(ev.StreamDown())
    assert w.up().preempted


def test_processes_are_told_how_long_there_is_after_what_has_not_begun_was_asked_back() -> None:
    w = Worker()
    w.assign([0])
    w.ready()
    actions = w.do(ev.Drain("spot", 15, True))
    assert [(a.child, a.budget_s) for a in of(actions, ev.LeaveIn)] == [(1, 15)]
    assert not of(w.do(ev.Drain("SIGTERM", 60)), ev.LeaveIn), "that is no sooner"
    assert [a.budget_s for a in of(w.do(ev.Drain("spot", 5, True)), ev.LeaveIn)] == [5]
    assert not of(w.do(ev.Drain("again", 0)), ev.LeaveIn)


def test_a_drain_with_nobody_to_tell_ends_at_once() -> None:
    never = Worker(welcome=False)
    never.up()
    assert of(never.do(ev.Drain("SIGTERM", 30)), ev.Exit)
    lost = Worker()
    lost.do(ev.StreamDown())
    lost.tick(30.0)
    assert lost.session.phase is Phase.FENCED
    assert of(lost.do(ev.Drain("SIGTERM", 30)), ev.Exit)


def test_a_drain_stops_what_does_not_fit_its_budget() -> None:
    w = Worker(self_fence_s=1e9)
    w.assign([0])
    w.ready()
    w.do(ev.Drain("preemption", 15))
    assert of(w.tick(15.1), ev.CancelIn)
    actions = w.end(1, 0, failure=Failure("cancelled", "cancelled"))
    assert [f.released.reason for f in w.sent(actions) if f.WhichOneof("body") == "released"] == ["drain"]
    assert of(actions, ev.Exit)
