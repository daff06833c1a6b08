"""The worker's session, event by event, in virtual time and without an event loop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from rollout.model.errors import AttemptError, ProtocolError
from rollout.model.item import DEFAULT_SPEC, Failure, ItemSpec
from rollout.model.worker import Inventory
from rollout.wire.codec import spec_to_wire
from rollout.wire.v1 import common_pb2, work_pb2
from rollout_worker import session_events as ev
from rollout_worker.attempts import TABLE, AttemptKey, Finished, Plan, State, group_to_wire, keys_from_wire
from rollout_worker.executors.port import Run
from rollout_worker.session import Phase, Session, SessionSettings

RUN = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
LOG = 1


def plan_run(run: Run) -> Plan:
    if run.workload == "unknown":
        raise AttemptError("no such executor", code="executor_missing")
    kind = "engine" if run.workload == "infer" else "slot"
    return Plan(run, kind, run.workload + run.name)


class Worker:
    """A session and its surroundings."""

    def __init__(self, slots: int = 1, welcome: bool = True, **settings: Any) -> None:
        self.session = Session(SessionSettings("W", Inventory(), slots=slots, **settings), plan_run)
        self.now = 100.0
        self.streams = 0
        self.actions: list[ev.Action] = []
        if welcome:
            self.up()
            self.down(welcome=work_pb2.Welcome(objects_addr="o:1"))

    def do(self, event: ev.Event) -> list[ev.Action]:
        new = self.session.handle(event, self.now)
        self.actions += new
        return new

    def up(self) -> work_pb2.Hello:
        self.streams += 1
        sent = self.sent(self.do(ev.StreamUp(f"S{self.streams}")))
        return sent[0].hello

    def down(self, session: str = "", **body: Any) -> list[ev.Action]:
        return self.do(ev.Frame(work_pb2.WorkDown(epoch=1, session=session or f"S{self.streams}", **body)))

    def assign(
        self,
        seqs: Sequence[int],
        spec: ItemSpec = DEFAULT_SPEC,
        *,
        workload: str = "script",
        run: str = RUN,
        **more: Any,
    ) -> list[ev.Action]:
        name = more.pop("name", "")
        group = work_pb2.AssignGroup(
            log=LOG,
            run=work_pb2.RunContext(run_id=run, workload=workload, config=b"{}", name=name),
            seq=seqs,
            attempt=[1] * len(seqs),
            ids=bytes(32) * len(seqs),
            length=[0] * len(seqs),
            specs=[spec_to_wire(spec)],
            **more,
        )
        return self.down(assign=work_pb2.Assign(groups=[group]))

    def ready(self, width: int = 1) -> list[ev.Action]:
        """Every process that was started comes up."""
        found: list[ev.Action] = []
        for child in [c for c in self.session.place.children.values() if c.state.value == "starting"]:
            found += self.do(ev.ChildReady(child.id, width))
        return found

    def end(self, child: int, *seqs: int, data: bytes = b"", failure: Failure | None = None) -> list[ev.Action]:
        outcome = 1 if failure is None else 2
        results = [Finished(LOG, seq, 1, "", data, outcome, failure) for seq in seqs]
        return self.do(ev.ChildResults(child, group_to_wire(LOG, results)))

    def tick(self, seconds: float = 0.0) -> list[ev.Action]:
        self.now += seconds
        return self.do(ev.Tick())

    def flush(self) -> list[work_pb2.WorkUp]:
        return self.sent(self.do(ev.Flush()))

    @staticmethod
    def sent(actions: list[ev.Action]) -> list[work_pb2.WorkUp]:
        return [a.frame for a in actions if isinstance(a, ev.Send)]


def delivered(actions: list[ev.Action]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for action in actions:
        if isinstance(action, ev.Deliver):
            found.setdefault(action.child, []).extend(h.seq for h in action.attempts)
    return found


def of(actions: list[ev.Action], kind: type) -> list[Any]:
    return [a for a in actions if isinstance(a, kind)]


def keys(*seqs: int) -> list[common_pb2.AttemptKeys]:
    return [common_pb2.AttemptKeys(log=LOG, seq=seqs, attempt=[1] * len(seqs))]


def seqs(wire: Any) -> list[int]:
    return [k.seq for k in keys_from_wire(wire)]


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


def test_an_executor_that_cannot_start_costs_one_attempt_per_try() -> None:
    w = Worker(self_fence_s=1e9)
    w.assign(range(8), workload="infer")
    actions = w.do(ev.ChildFailed(1, Failure("model_missing", "no model", False)))
    credit = [f.credit for f in w.sent(actions) if f.WhichOneof("body") == "credit"]
    assert dict(credit[0].run_items) == {RUN: 1}
    (result,) = w.session.unacknowledged.values()
    assert result.failure == Failure("engine_start", "its executor cannot start on this worker: no model", True)
    released = [f.released for f in w.flush() if f.WhichOneof("body") == "released"]
    assert seqs(released[0].keys) == list(range(1, 8))
    w.do(ev.ChildEnded(1, "it stopped"))
    assert not of(w.assign([20], workload="infer"), ev.StartChild)
    assert of(w.tick(1.0), ev.StartChild)


def test_an_executor_that_does_not_start_in_time_is_killed_and_tried_again() -> None:
    w = Worker(self_fence_s=1e9, start_timeout_s=30.0)
    w.assign(range(3), workload="infer")
    assert not of(w.tick(29.0), ev.StopChild)
    assert of(w.tick(2.0), ev.StopChild) == [ev.StopChild(1, True)]
    (result,) = w.session.unacknowledged.values()
    assert result.failure is not None and result.failure.code == "engine_start" and result.failure.retryable
    assert "not ready within 30 s" in result.failure.message
    released = [f.released for f in w.flush() if f.WhichOneof("body") == "released"]
    assert seqs(released[0].keys) == [1, 2]
    w.do(ev.ChildEnded(1, "signal SIGKILL"))
    assert not w.session.place.children
    w.assign([20], workload="infer")
    assert of(w.tick(1.0), ev.StartChild)
    w.ready()
    assert not of(w.tick(60.0), ev.StopChild), "one that is up has all the time it wants"


def test_an_engine_takes_its_width_and_raises_credit_for_its_run() -> None:
    w = Worker(slots=1)
    w.assign(range(5), workload="infer")
    actions = w.ready(width=3)
    assert delivered(actions) == {1: [0, 1, 2]}
    credit = [f.credit for f in w.sent(actions) if f.WhichOneof("body") == "credit"]
    assert (credit[0].items, dict(credit[0].run_items)) == (2, {RUN: 6})


def test_a_run_that_finds_its_engine_up_gets_the_same_credit() -> None:
    w = Worker(slots=1)
    other = RUN[:-1] + "W"
    w.assign(range(2), workload="infer")
    w.ready(width=3)
    w.end(1, 0)
    w.end(1, 1)
    credit = [f.credit for f in w.sent(w.assign([0], workload="infer", run=other)) if f.WhichOneof("body") == "credit"]
    assert dict(credit[-1].run_items) == {RUN: 6, other: 6}


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


def test_an_engine_in_use_is_not_evicted_and_an_idle_one_is() -> None:
    w = Worker()
    w.assign([0], workload="infer", name="a")
    w.ready(width=4)
    assert not of(w.assign([1], workload="infer", name="b", run=RUN[:-1] + "W"), ev.StopChild)
    assert [a.child for a in of(w.end(1, 0), ev.StopChild)] == [1]
    assert of(w.do(ev.ChildEnded(1, "it stopped")), ev.StartChild)


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


def test_a_goodbye_whose_stream_broke_is_said_again() -> None:
    w = Worker()
    w.tick()
    assert of(w.do(ev.Drain("SIGTERM", 30)), ev.Exit)
    w.do(ev.StreamDown())
    again = w.sent(w.do(ev.StreamUp("S9")))
    assert [f.WhichOneof("body") for f in again] == ["hello", "goodbye"] and again[0].hello.draining
    assert not w.tick(1.0)


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


def test_credit_follows_the_pace_of_short_attempts_and_falls_back() -> None:
    w = Worker(self_fence_s=1e9)
    w.session.credit.engine_up(RUN, 1)
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


def test_an_unknown_workload_fails_its_attempts_here_and_may_be_tried_elsewhere() -> None:
    w = Worker()
    w.assign([0], workload="unknown")
    (result,) = w.session.unacknowledged.values()
    assert result.failure == Failure("executor_missing", "no such executor", True)


def test_frames_of_older_streams_are_ignored_and_odd_ones_are_faults() -> None:
    w = Worker()
    assert w.down(session="S0", welcome=work_pb2.Welcome()) == []
    with pytest.raises(ProtocolError, match="second Welcome"):
        w.down(welcome=work_pb2.Welcome())
    with pytest.raises(ProtocolError, match="without a body"):
        w.down()
    with pytest.raises(ProtocolError, match="never sent"):
        w.assign([0], workload="")
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
