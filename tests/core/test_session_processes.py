"""The processes of a worker: crashes and starts, engines and who shares them, credit, what waits in one."""

from __future__ import annotations

import pytest
from rollout.model.item import NO_LIMIT, Failure, ItemSpec
from rollout.wire.v1 import work_pb2
from rollout_worker import session_events as ev
from rollout_worker.attempts import AttemptKey, Plan
from rollout_worker.executors.port import Run
from rollout_worker.placement import FAIR_S
from session_world import LOG, RUN, Worker, delivered, keys, of, seqs


def test_a_crash_is_a_loss_of_what_ran_and_of_nothing_behind_it() -> None:
    w = Worker()
    w.assign([0, 1])
    w.ready()
    w.session.place.children[1].depth = 8
    w.assign([2, 3])
    assert set(w.session.place.children[1].in_hand) == {(LOG, s) for s in range(4)}
    w.do(ev.ChildEnded(1, "signal SIGSEGV"))
    (result,) = w.session.unacknowledged.values()
    assert result.failure is not None and result.failure.worker_lost and result.failure.code == "executor_crashed"
    assert result.seq == 0
    assert not of(w.tick(0.05), ev.StartChild)  # backoff
    assert of(w.tick(0.1), ev.StartChild)
    assert delivered(w.ready()) == {2: [1]}  # alone again: the next to crash is known for sure


def test_restarts_back_off_exponentially_until_something_succeeds() -> None:
    w = Worker(self_fence_s=1e9)
    w.assign(range(10))
    delays: list[float] = []
    for child in range(1, 5):
        w.ready()
        w.do(ev.ChildEnded(child, "x"))
        delays.append(w.session.place.backoff("script").until - w.now)
        w.tick(delays[-1])
    assert delays == pytest.approx([0.1, 0.2, 0.4, 0.8])
    w.ready()
    w.end(5, 4)
    assert w.session.place.backoff("script").failures == 0


def test_an_executor_that_cannot_start_costs_no_attempt() -> None:
    w = Worker(self_fence_s=1e9)
    w.assign(range(8), workload="infer")
    actions = w.do(ev.ChildFailed(1, Failure("model_missing", "no model", False)))
    credit = [f.credit for f in w.sent(actions) if f.WhichOneof("body") == "credit"]
    assert dict(credit[0].run_items) == {RUN: 1}
    assert not w.session.unacknowledged
    released = [f.released for f in w.flush() if f.WhichOneof("body") == "released"]
    assert (seqs(released[0].keys), released[0].reason) == (list(range(8)), "engine_start")
    w.do(ev.ChildEnded(1, "it stopped"))
    assert of(w.tick(1.0), ev.StartChild) == [], "nothing waits for it"
    assert of(w.assign([20], workload="infer"), ev.StartChild)


def causes(actions: list[ev.Action]) -> list[work_pb2.CannotStart]:
    """As the coordinator knows them after these."""
    told = [f.causes for f in Worker.sent(actions) if f.WhichOneof("body") == "causes"]
    return list(told[-1].causes) if told else []


def test_why_an_executor_cannot_start_is_told_before_its_attempts_come_back() -> None:
    w = Worker(self_fence_s=1e9)
    w.assign(range(2), workload="infer")
    sent = w.sent(w.do(ev.ChildFailed(1, Failure("model_missing", "no model", False)))) + w.flush()
    kinds = [f.WhichOneof("body") for f in sent]
    assert kinds.index("causes") < kinds.index("released")
    (cause,) = causes(w.actions)
    assert (cause.run_id, cause.executor, cause.code, cause.message) == (RUN, "infer", "model_missing", "no model")
    assert (cause.times, cause.final, cause.any_resources) == (1, True, True)
    assert 1000 <= cause.retry_in_ms <= 1001


def test_a_cause_that_may_go_away_is_final_after_some_tries() -> None:
    w = Worker(self_fence_s=1e9)
    final: list[bool] = []
    for child in range(1, 7):
        w.assign([child], workload="infer")
        w.do(ev.ChildFailed(child, Failure("out_of_device_memory", "it is held by another", True)))
        w.do(ev.ChildEnded(child, "it stopped"))
        final.append(causes(w.actions)[0].final)
        w.tick(60.0)
    assert final == [False] * 3 + [True] * 3


def test_what_cannot_start_yet_is_not_kept_here() -> None:
    w = Worker(self_fence_s=1e9)
    w.assign([0], workload="infer")
    w.do(ev.ChildFailed(1, Failure("model_missing", "no model", False)))
    w.do(ev.ChildEnded(1, "it stopped"))
    w.flush()
    other = RUN[:-1] + "W"
    actions = w.assign([7], workload="infer", run=other)
    assert not of(actions, ev.StartChild)
    assert {cause.run_id for cause in causes(w.actions)} == {RUN, other}
    released = [f.released for f in w.sent(actions) + w.flush() if f.WhichOneof("body") == "released"]
    assert seqs(released[0].keys) == [7]


def test_causes_are_told_again_on_a_new_stream_and_end_with_a_start() -> None:
    w = Worker(self_fence_s=1e9)
    w.assign([0], workload="infer")
    w.do(ev.ChildFailed(1, Failure("model_missing", "no model", False)))
    w.do(ev.ChildEnded(1, "it stopped"))
    w.up()
    assert len(causes(w.down(welcome=work_pb2.Welcome()))) == 1
    w.tick(2.0)
    w.assign([1], workload="infer")
    (told,) = [f for f in w.sent(w.ready()) if f.WhichOneof("body") == "causes"]
    assert not told.causes.causes


def test_a_run_that_ended_with_its_cause_is_tried_at_once_when_it_goes_on() -> None:
    w = Worker(self_fence_s=1e9)
    w.assign([0], workload="infer")
    w.do(ev.ChildFailed(1, Failure("model_missing", "no model", False)))
    w.do(ev.ChildEnded(1, "it stopped"))
    w.down(ended=work_pb2.RunEnded(run_id=RUN, state="failed"))
    assert of(w.assign([1], workload="infer"), ev.StartChild)


def test_one_process_more_that_does_not_start_takes_nothing_from_those_that_did() -> None:
    w = Worker(slots=2, self_fence_s=1e9)
    w.assign([0])
    w.ready()
    w.assign([1, 2])
    w.do(ev.ChildFailed(2, Failure("executor_error", "no room", True)))
    assert not causes(w.actions)
    assert delivered(w.end(1, 0)) == {1: [1, 2]}


def test_an_executor_that_does_not_start_in_time_is_killed_and_tried_again() -> None:
    w = Worker(self_fence_s=1e9, start_timeout_s=30.0)
    w.assign(range(3), workload="infer")
    assert not of(w.tick(29.0), ev.StopChild)
    assert of(w.tick(2.0), ev.StopChild) == [ev.StopChild(1, True)]
    (cause,) = causes(w.actions)
    assert (cause.code, cause.final) == ("start_timeout", False) and "not ready within 30 s" in cause.message
    released = [f.released for f in w.flush() if f.WhichOneof("body") == "released"]
    assert seqs(released[0].keys) == [0, 1, 2]
    w.do(ev.ChildEnded(1, "signal SIGKILL"))
    assert not w.session.place.children
    w.tick(1.0)
    assert of(w.assign([20], workload="infer"), ev.StartChild)
    w.ready()
    assert not of(w.tick(60.0), ev.StopChild), "one that is up has all the time it wants"


def test_an_engine_takes_its_width_and_raises_credit_for_its_run() -> None:
    w = Worker(slots=1)
    w.assign(range(5), workload="infer")
    actions = w.ready(width=3)
    assert delivered(actions) == {1: [0, 1, 2]}
    credit = [f.credit for f in w.sent(actions) if f.WhichOneof("body") == "credit"]
    assert (credit[0].items, dict(credit[0].run_items)) == (2, {RUN: 6})


def test_slots_whose_processes_run_several_take_their_width_each() -> None:
    w = Worker(slots=2)
    w.assign(range(7))
    actions = w.ready(width=3)
    assert delivered(actions) == {1: [0, 1, 2], 2: [3, 4, 5]}
    credit = [f.credit for f in w.sent(actions) if f.WhichOneof("body") == "credit"]
    assert dict(credit[0].run_items) == {RUN: 12}


def test_a_run_that_finds_its_engine_up_gets_the_same_credit() -> None:
    w = Worker(slots=1)
    other = RUN[:-1] + "W"
    w.assign(range(2), workload="infer")
    w.ready(width=3)
    w.end(1, 0)
    w.end(1, 1)
    credit = [f.credit for f in w.sent(w.assign([0], workload="infer", run=other)) if f.WhichOneof("body") == "credit"]
    assert dict(credit[-1].run_items) == {RUN: 6, other: 6}


def test_credit_follows_the_pace_of_short_attempts_and_falls_back() -> None:
    w = Worker(self_fence_s=1e9)
    w.session.credit.started(RUN, "script", 1)
    for _ in range(20):
        for _ in range(2000):
            w.session.credit.ended(RUN)
        w.tick(0.11)
    assert dict(w.session.credit.current().run_items)[RUN] == 2048
    for _ in range(20):
        w.tick(0.11)
    assert dict(w.session.credit.current().run_items)[RUN] == 2


def test_credit_goes_at_once_to_what_a_fast_pace_asks_for() -> None:
    w = Worker(slots=4, self_fence_s=1e9)
    for _ in range(300):
        w.session.credit.ended(RUN)
    w.tick(0.11)
    assert dict(w.session.credit.current().run_items) == {RUN: 600}


def test_credit_grows_where_answers_come_in_bursts_that_are_far_apart() -> None:
    """As from a ledger whose commits take 0.3 s: between two of them nothing ends, and that is no sign of too much."""
    w = Worker(slots=4, self_fence_s=1e9)

    def credit() -> int:
        return dict(w.session.credit.current().run_items).get(RUN, w.session.credit.base)

    end = 0
    for _ in range(25):
        begin, end = end, end + credit()
        w.assign(range(begin, end))
        w.ready()
        while busy := [child for child in w.session.place.children.values() if child.in_hand]:
            for child in busy:
                w.end(child.id, *(seq for _, seq in child.in_hand))
        w.flush()
        for _ in range(6):
            w.tick(0.05)
        w.down(accepted=work_pb2.Accepted(accepted=keys(*range(begin, end))))
        assert not w.session.unacknowledged
    assert credit() >= 1000
    for _ in range(20):
        w.tick(0.7)
    assert credit() == w.session.credit.base


def test_an_isolated_attempt_runs_alone_in_its_engine() -> None:
    w = Worker()
    w.assign([0, 1, 2], workload="infer", isolate=[1])
    assert delivered(w.ready(width=8)) == {1: [0]}
    assert delivered(w.end(1, 0)) == {1: [1]}
    assert delivered(w.end(1, 1)) == {1: [2]}


def test_an_isolated_child_does_not_wait_for_the_parent_that_waits_for_it() -> None:
    w = Worker()
    w.assign([0], workload="infer")
    w.ready(width=4)
    w.do(ev.ChildWaits(1, work_pb2.Waiting(log=LOG, seq=0, attempt=1)))
    assert delivered(w.assign([1, 2], workload="infer", isolate=[0])) == {1: [1]}
    assert delivered(w.end(1, 1)) == {1: [2]}


def test_children_of_an_isolated_parent_that_waits_find_its_engine() -> None:
    w = Worker()
    w.assign([0], workload="infer", isolate=[0])
    assert delivered(w.ready(width=4)) == {1: [0]}
    assert not delivered(w.assign([1], workload="infer"))
    assert delivered(w.do(ev.ChildWaits(1, work_pb2.Waiting(log=LOG, seq=0, attempt=1)))) == {1: [1]}


def test_what_may_be_lost_for_ever_is_no_company_of_an_isolated_attempt() -> None:
    w = Worker()
    w.assign([0], ItemSpec(max_worker_lost=NO_LIMIT), workload="infer")
    assert delivered(w.ready(width=8)) == {1: [0]}
    assert delivered(w.assign([1, 2], workload="infer", isolate=[0])) == {1: [1]}
    assert delivered(w.end(1, 1)) == {1: [2]}


def test_what_waits_behind_an_endless_attempt_is_shown_why_and_takes_nothing_from_it() -> None:
    w = Worker(self_fence_s=1e9)
    w.assign([0], ItemSpec(max_worker_lost=NO_LIMIT), workload="infer", name="a")
    w.ready(width=4)
    other = RUN[:-1] + "W"
    actions = w.assign([1], workload="infer", name="b", run=other)
    (cause,) = [cause for frame in w.sent(actions) for cause in frame.causes.causes]
    assert (cause.run_id, cause.code, cause.final) == (other, "no_room", False)
    w.tick(FAIR_S + 1)
    assert delivered(w.assign([2], workload="infer", name="a")) == {1: [2]}
    w.end(1, 2)
    told = w.sent(w.end(1, 0))
    assert [len(frame.causes.causes) for frame in told if frame.HasField("causes")] == [0]


def test_an_engine_in_use_is_not_evicted_and_an_idle_one_is() -> None:
    w = Worker()
    w.assign([0], workload="infer", name="a")
    w.ready(width=4)
    assert not of(w.assign([1], workload="infer", name="b", run=RUN[:-1] + "W"), ev.StopChild)
    assert [a.child for a in of(w.end(1, 0), ev.StopChild)] == [1]
    assert of(w.do(ev.ChildEnded(1, "it stopped")), ev.StartChild)


def test_runs_that_share_a_slot_take_turns_and_do_not_swap_at_every_row() -> None:
    w, other = Worker(self_fence_s=1e9), RUN[:-1] + "W"
    w.assign([0], name="a")
    w.ready()
    assert not of(w.assign([1], name="b", run=other), ev.StopChild)
    for seq in range(2, 12):  # the rows of one run follow each other, with a moment between them
        assert not of([*w.end(1, 0 if seq == 2 else seq - 1), *w.tick(0.2)], ev.StopChild)
        assert 1 in delivered(w.assign([seq], name="a"))
    assert not of(w.tick(1.0), ev.StopChild)
    assert not of(w.assign([12], name="a"), ev.Deliver), "its turn is over"
    assert [a.child for a in of([*w.end(1, 11), *w.tick()], ev.StopChild)] == [1]
    w.do(ev.ChildEnded(1, "it stopped"))
    assert delivered(w.ready()) == {2: [1]}


def test_an_idle_process_makes_room_for_another_run_after_a_moment() -> None:
    w = Worker(self_fence_s=1e9)
    w.assign([0], name="a")
    w.ready()
    w.end(1, 0)
    assert not of(w.assign([1], name="b", run=RUN[:-1] + "W"), ev.StopChild)
    assert [a.child for a in of(w.tick(0.5), ev.StopChild)] == [1]


def test_a_waiting_parent_frees_its_slot_and_says_so_again_on_a_new_stream() -> None:
    w = Worker()
    w.assign([0])
    w.ready()
    w.do(ev.ChildSpawned(1, work_pb2.Spawn(log=LOG, seq=0, attempt=1, seal=True)))
    w.do(ev.ChildWaits(1, work_pb2.Waiting(log=LOG, seq=0, attempt=1)))
    assert w.session.running == 0
    assert of(w.assign([5]), ev.StartChild)
    assert delivered(w.ready()) == {2: [5]}
    w.do(ev.StreamDown())
    w.up()
    sent = w.sent(w.down(welcome=work_pb2.Welcome(keep=keys(0, 5))))
    assert [f.WhichOneof("body") for f in sent] == ["spawn", "waiting"]
    assert of(w.down(resume=work_pb2.Resume(log=LOG, seq=0, attempt=1)), ev.ResumeIn)
    assert w.session.running == 2


def test_what_waits_in_a_process_behind_a_long_attempt_comes_back_and_runs_elsewhere() -> None:
    w = Worker(slots=2)
    w.assign([0, 1])
    w.ready()
    w.flush()
    w.end(1, 0)
    w.end(2, 1)  # so quick that the processes are given two at a time from now on
    w.flush()
    assert delivered(w.assign([2, 3])) == {1: [2, 3]}
    assert seqs(w.flush()[-1].started.keys) == [2], "the other has not begun"
    assert of(w.tick(0.02), ev.RecallIn) == []
    (recall,) = of(w.tick(0.05), ev.RecallIn)
    assert recall == ev.RecallIn(1, [AttemptKey(LOG, 3, 1)])
    assert of(w.tick(0.1), ev.RecallIn) == [], "asked once"
    assert delivered(w.do(ev.ChildReturned(1, recall.keys))) == {2: [3]}
    assert seqs(w.flush()[-1].started.keys) == [3]


def test_a_pause_takes_back_what_a_process_has_not_begun() -> None:
    w = Worker()
    w.assign([0])
    w.ready()
    w.end(1, 0)
    w.flush()
    w.assign([1, 2])
    w.flush()
    (recall,) = of(w.down(pause=work_pb2.Pause(run_id=RUN)), ev.RecallIn)
    w.do(ev.ChildReturned(1, recall.keys))
    released = [f.released for f in w.flush() if f.HasField("released")]
    assert [(seqs(r.keys), r.reason) for r in released] == [([2], "pause")]
    assert [k.seq for k in w.session.held] == [1]


def test_what_runs_on_behind_a_parent_that_waits_has_begun() -> None:
    """Its timeout counts from there, and the coordinator hears that it cannot be stolen."""
    w = Worker(slots=1, cancel_grace_s=1.0)
    w.assign([0])
    w.ready()
    w.flush()
    w.end(1, 0)  # so quick that its process is given two at a time from now on
    timed = ItemSpec(timeout_ms=1000)
    assert delivered(w.assign([1, 2], spec=timed)) == {1: [1, 2]}
    w.flush()
    w.now += 1.0
    sent = w.sent(w.do(ev.ChildWaits(1, work_pb2.Waiting(log=LOG, seq=1, attempt=1))))
    assert [f.WhichOneof("body") for f in sent] == ["started", "waiting"]
    assert seqs(sent[0].started.keys) == [2]
    assert [k.seq for a in of(w.tick(0.5), ev.CancelIn) for k in a.keys] == [1]
    assert [k.seq for a in of(w.tick(0.5), ev.CancelIn) for k in a.keys] == [2]


def test_a_parent_whose_resume_was_lost_is_resumed_on_the_next_stream() -> None:
    """It has the results, and has not read them: it still waits for the first of them."""
    w = Worker()
    w.assign([0])
    w.ready()
    w.do(ev.ChildWaits(1, work_pb2.Waiting(log=LOG, seq=0, attempt=1, from_child=2)))
    results = work_pb2.ChildResults(
        parent_log=LOG, parent_seq=0, from_child=2, outcome=["OUTCOME_DONE"], length=[1], data=b"x", complete=False
    )
    assert of(w.down(children=results), ev.PassChildren)
    w.do(ev.StreamDown())
    w.up()
    (told,) = w.sent(w.down(welcome=work_pb2.Welcome(keep=keys(0))))
    assert told.waiting.from_child == 2


def test_a_parent_that_works_on_keeps_its_place_and_says_so_on_the_next_stream() -> None:
    w = Worker()
    w.assign([0])
    w.ready()
    w.do(ev.ChildWaits(1, work_pb2.Waiting(log=LOG, seq=0, attempt=1, holds=True)))
    assert w.session.place.children[1].waiting == 0
    w.do(ev.StreamDown())
    w.up()
    (told,) = w.sent(w.down(welcome=work_pb2.Welcome(keep=keys(0))))
    assert told.waiting.holds


def test_a_process_of_one_run_ends_with_it() -> None:
    def own(run: Run) -> Plan:
        return Plan(run, "slot", f'["{run.run_id}"]')

    w = Worker(plan_run=own, slots=2)
    w.assign([0])
    w.assign([1], run="01ARZ3NDEKTSV4RRFFQ69G5FA0")
    w.ready()
    w.end(1, 0)
    w.end(2, 1)
    w.down(ended=work_pb2.RunEnded(run_id=RUN))
    (stop,) = of(w.tick(0.1), ev.StopChild)
    assert stop.child == 1 and not stop.kill


def test_what_began_while_a_parent_waited_is_lost_with_their_process_and_not_begun_again() -> None:
    w = Worker()
    w.assign([0], workload="infer")
    w.ready(width=1)
    w.do(ev.ChildWaits(1, work_pb2.Waiting(log=LOG, seq=0, attempt=1)))
    assert delivered(w.assign([1, 2], workload="infer")) == {1: [1]}
    w.session.place.children[1].depth = 4
    assert delivered(w.tick()) == {1: [2]}
    w.down(resume=work_pb2.Resume(log=LOG, seq=0, attempt=1))
    assert w.session.place.children[1].behind() == [AttemptKey(LOG, 2, 1)]
    w.do(ev.ChildEnded(1, "signal SIGSEGV"))
    lost = {r.seq: r.failure for r in w.session.unacknowledged.values()}
    assert sorted(lost) == [0, 1] and all(f is not None and f.worker_lost for f in lost.values())
    w.tick(1.0)
    assert delivered(w.ready()) == {2: [2]}
