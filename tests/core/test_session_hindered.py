"""What keeps an attempt from going on in its midst: told as a cause, and nobody pays for it with a try."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rollout.model.errors import ProtocolError
from rollout.model.item import Failure, ObjectSlice
from rollout.wire.v1 import common_pb2, work_pb2
from rollout_worker import session_events as ev
from rollout_worker.attempts import AttemptKey
from rollout_worker.processes.frames import read_frame
from rollout_worker.processes.kinds import Kind
from session_world import LOG, Worker, keys, of

FULL = Failure("disk_full", "the disk is full", True)
OTHER = Failure("different_hardware", "another device", False)
FIRST = AttemptKey(LOG, 0, 1)


def busy() -> Worker:
    """Its process runs item 0, and has item 1 behind it."""
    w = Worker(slots=1, self_fence_s=1e9)
    w.assign([0, 1], workload="infer")
    w.ready(width=1)
    w.do(ev.Flush())
    return w


def frames(w: Worker, kind: str, actions: list[ev.Action]) -> list[Any]:
    found = w.sent(actions) + w.sent(w.do(ev.Flush()))
    return [getattr(frame, kind) for frame in found if frame.WhichOneof("body") == kind]


def causes(w: Worker, actions: list[ev.Action]) -> list[work_pb2.CannotStart]:
    said = frames(w, "causes", actions)
    assert said, "nothing was told"
    return list(said[-1].causes)


def test_an_attempt_that_waits_is_a_cause_that_is_never_final_and_ends_with_the_wait() -> None:
    w = busy()
    for _ in range(5):
        w.do(ev.ChildHindered(1, FIRST, FULL, returned=False))
    (told,) = causes(w, w.do(ev.ChildHindered(1, FIRST, FULL, returned=False)))
    assert (told.code, told.times, told.final, told.retry_in_ms) == ("disk_full", 6, False, 1)
    assert FIRST in w.session.held, "it is still at it"
    assert not causes(w, w.do(ev.ChildHindered(1, FIRST, Failure("", "", True), returned=False)))
    assert not w.sent(w.do(ev.ChildHindered(1, AttemptKey(LOG, 7, 1), FULL, returned=False))), "of none that it has"


def test_an_attempt_that_does_not_suit_this_worker_goes_back_behind_the_cause() -> None:
    w = busy()
    actions = w.do(ev.ChildHindered(1, FIRST, OTHER, returned=True))
    sent = [f.WhichOneof("body") for f in w.sent(actions) + w.sent(w.do(ev.Flush()))]
    assert sent.index("causes") < sent.index("released") and "results" not in sent
    assert FIRST not in w.session.held and not w.session.unacknowledged


def test_a_worker_that_can_go_on_after_all_has_no_cause_any_more() -> None:
    w = busy()
    (told,) = causes(w, w.do(ev.ChildHindered(1, FIRST, OTHER, returned=True)))
    assert told.final and told.retry_in_ms > 1
    w.tick(60.0)
    w.assign([5], workload="infer")
    assert not causes(w, w.end(1, 5))


def test_what_a_process_says_of_it_is_checked() -> None:
    good = {"log": 1, "seq": 2, "attempt": 1, "code": "c", "message": "m\ud800", "retryable": True, "returned": False}
    event = read_frame(3, Kind.HINDERED, json.dumps(good).encode())
    assert isinstance(event, ev.ChildHindered) and event.key == AttemptKey(1, 2, 1)
    event.failure.message.encode()
    for key, value in (("log", "1"), ("seq", None), ("attempt", True), ("returned", 1), ("message", 3)):
        with pytest.raises(ProtocolError):
            read_frame(3, Kind.HINDERED, json.dumps(good | {key: value}).encode())
    long = work_pb2.Progress(note="n" * 5000, figures=b"{}")
    long.keys.add(log=1, seq=[1], attempt=[1])
    told = read_frame(3, Kind.PROGRESS, long.SerializeToString())
    assert isinstance(told, ev.ChildProgress) and len(told.note) == 1000
    long.figures = b"[1]"
    with pytest.raises(ProtocolError):
        read_frame(3, Kind.PROGRESS, long.SerializeToString())


AWAY = Failure("store_unavailable", "its input cannot be moved: the object store is not there", True)


def with_large_input(w: Worker) -> None:
    w.assign([0], refs=[common_pb2.IndexedRef(index=0, ref=common_pb2.ObjectRef(object_id=bytes(32)))])


def test_an_input_that_waits_for_the_store_goes_back_behind_a_cause_that_is_never_final() -> None:
    w = Worker(self_fence_s=1e9)
    for _ in range(8):
        with_large_input(w)
        actions = w.do(ev.FetchFailed(FIRST, AWAY))
        sent = w.sent(actions) + w.sent(w.do(ev.Flush()))
        assert [f.WhichOneof("body") for f in sent] == ["causes", "released"] and not w.session.held
        (told,) = sent[0].causes.causes
        assert (told.code, told.final) == ("store_unavailable", False) and 1000 <= told.retry_in_ms <= 10_001
        with_large_input(w)  # too early
        assert [f.WhichOneof("body") for f in w.sent(w.do(ev.Flush()))][-1] == "released" and not w.session.held
        w.tick(10.1)
    with_large_input(w)
    assert not causes(w, w.do(ev.Fetched([ev.Input(FIRST, b"in", None)]))), "it is back"
    assert FIRST in w.session.held and not w.session.unacknowledged


def storing() -> Worker:
    w = Worker(self_fence_s=1e9)
    w.assign([0])
    w.ready()
    w.end(1, 0, data=b"x" * 5000)
    return w


def test_a_result_that_waits_for_the_store_is_kept_until_it_is_back() -> None:
    w = storing()
    for _ in range(8):
        (told,) = causes(w, w.do(ev.StoreFailed(FIRST, AWAY)))
        assert (told.code, told.final) == ("store_unavailable", False)
        assert not of(w.tick(0.5), ev.Store)
        (again,) = of(w.tick(10.0), ev.Store)
        assert again.key == FIRST and len(again.data) == 5000
    assert not causes(w, w.do(ev.Stored(FIRST, ObjectSlice(bytes(32), 0, 5000))))
    (result,) = w.session.unacknowledged.values()
    assert result.failure is None and result.data == ObjectSlice(bytes(32), 0, 5000)


def test_a_failure_whose_evidence_cannot_be_stored_has_failed_as_it_did() -> None:
    w = Worker()
    w.assign([0])
    w.ready()
    broken = Failure("broken", "it broke", retryable=False, retry_after_ms=9)
    (store,) = of(w.end(1, 0, data=b"x" * 5000, failure=broken), ev.Store)
    assert len(store.data) == 5000
    w.do(ev.StoreFailed(FIRST, Failure("object_store", "no such bucket", True)))
    (result,) = w.session.unacknowledged.values()
    assert result.failure is not None
    assert (result.data, result.failure.code, result.failure.retryable) == (b"", "broken", False)
    assert result.failure.message == "it broke; what it left behind could not be stored: no such bucket"


@pytest.mark.parametrize("under_way", [False, True])
def test_a_result_that_nobody_wants_any_more_does_not_wait_for_the_store(under_way: bool) -> None:
    w = storing()
    w.do(ev.StoreFailed(FIRST, AWAY))
    if under_way:
        w.tick(10.0)
    w.down(cancel=work_pb2.Cancel(keys=keys(0)))
    if under_way:
        assert FIRST in w.session.held
        w.do(ev.StoreFailed(FIRST, AWAY))
    assert FIRST not in w.session.held and not of(w.tick(60.0), ev.Store)
    w.do(ev.Stored(FIRST, ObjectSlice(bytes(32), 0, 5000)))  # too late
    assert [r.failure for r in w.session.unacknowledged.values()] == ([AWAY] if under_way else [])
