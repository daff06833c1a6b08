"""What a session tells of, and one thing it is told twice: what mutation found that no test missed."""

from __future__ import annotations

from rollout.model.item import Failure
from rollout.wire.v1 import common_pb2, work_pb2
from rollout_worker import session_events as ev
from rollout_worker.attempts import AttemptKey
from session_world import LOG, RUN, Worker, keys, of

OTHER = RUN[:-1] + "W"


def test_progress_of_an_attempt_is_passed_on_with_what_runs_beside_it() -> None:
    w = Worker(slots=2)
    w.assign([0, 1])
    w.ready()
    (frame,) = [f for f in w.sent(w.do(ev.ChildProgress(1, AttemptKey(LOG, 0, 1), "half"))) if f.HasField("progress")]
    assert frame.progress == work_pb2.Progress(run_id=RUN, running=2, note="half", keys=keys(0))
    assert not w.sent(w.do(ev.ChildProgress(1, AttemptKey(LOG, 9, 1), "whose?")))


def test_an_input_that_cannot_be_had_fails_its_attempt_alone() -> None:
    w = Worker()
    w.assign([0], refs=[common_pb2.IndexedRef(index=0, ref=common_pb2.ObjectRef(object_id=bytes(32)))])
    w.do(ev.FetchFailed(AttemptKey(LOG, 0, 1), Failure("object_missing", "no such object", False)))
    (result,) = w.session.unacknowledged.values()
    assert result.failure == Failure("object_missing", "no such object", False)
    w.assign([1])
    w.do(ev.FetchFailed(AttemptKey(LOG, 1, 1), Failure("object_missing", "an old answer", False)))
    assert len(w.session.unacknowledged) == 1, "nothing was being fetched for it"


def test_what_a_crash_has_cost_may_be_tried_again() -> None:
    w = Worker()
    w.assign([0])
    w.ready()
    w.do(ev.ChildEnded(1, "signal SIGSEGV"))
    (result,) = w.session.unacknowledged.values()
    assert result.failure is not None and result.failure.retryable


def test_an_engine_that_no_longer_starts_throttles_each_run_that_shares_it() -> None:
    w = Worker(slots=1, self_fence_s=1e9)
    w.assign([0], workload="infer")
    w.ready(width=3)
    w.assign([5], workload="infer", run=OTHER)
    w.do(ev.ChildEnded(1, "signal SIGKILL"))
    w.assign([1], workload="infer")
    w.assign([6], workload="infer", run=OTHER)
    (start,) = of(w.tick(1.0), ev.StartChild)
    actions = w.do(ev.ChildFailed(start.child, Failure("model_missing", "no model", False)))
    assert dict(w.session.credit.current().run_items) == {RUN: 1, OTHER: 1}
    (told,) = of(actions, ev.Emit)
    assert (told.event, told.level, told.fields["code"]) == ("engine_start_failed", "error", "model_missing")


def test_results_that_leave_with_a_credit_count_from_then() -> None:
    w = Worker(slots=2)
    w.assign([0])
    w.ready()
    w.end(1, 0)
    w.assign([1], workload="infer", run=OTHER)
    w.now += 1
    w.ready(width=3)
    (result,) = w.session.unacknowledged.values()
    assert result.sent == w.now


def test_a_fence_says_how_long_nobody_was_heard() -> None:
    w = Worker(self_fence_s=4.0)
    w.do(ev.Acknowledged(w.now))
    told = [e for e in of(w.tick(4.5), ev.Emit) if e.event == "worker_fenced"]
    assert [(e.level, e.fields) for e in told] == [("warning", {"silent_s": 4.5})]


def test_an_assignment_that_is_told_twice_hides_none_behind_it() -> None:
    w = Worker(slots=1)
    w.assign([0])
    w.assign([0, 1])
    assert set(w.session.held) == {AttemptKey(LOG, 0, 1), AttemptKey(LOG, 1, 1)}
