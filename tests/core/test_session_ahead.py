"""Engines that are given rows before their turn: what counts as begun, and what can still be taken from them."""

from __future__ import annotations

from typing import Any

from rollout.wire.v1 import work_pb2
from rollout_worker import session_events as ev
from rollout_worker.attempts import AttemptKey
from session_world import LOG, RUN, Worker, delivered, keys, of, seqs


def engine(width: int, ahead: int, rows: int) -> Worker:
    w = Worker()
    w.assign(range(rows), workload="infer")
    w.do(ev.ChildReady(1, width, ahead))
    return w


def revoke(w: Worker, number: int, *which: int) -> list[ev.Action]:
    return w.down(revoke=work_pb2.Revoke(revoke_id=number, keys=keys(*which)))


def confirmed(actions: list[ev.Action]) -> list[tuple[int, list[int], list[int]]]:
    sent = [f.confirm for f in Worker.sent(actions) if f.HasField("confirm")]
    return [(c.revoke_id, seqs(c.given_up), seqs(c.kept)) for c in sent]


def attempt(seq: int) -> AttemptKey:
    return AttemptKey(LOG, seq, 1)


def test_an_engine_has_its_next_batch_before_this_one_ends_and_only_this_one_has_begun() -> None:
    w = engine(2, 2, 6)
    assert delivered(w.actions) == {1: [0, 1, 2, 3]}
    assert seqs(w.flush()[0].started.keys) == [0, 1]
    assert w.session.running == 2
    assert delivered(w.end(1, 0, 1)) == {1: [4, 5]}
    assert seqs(w.flush()[0].started.keys) == [2, 3], "without a message to the process"
    assert of(w.tick(1.0), ev.RecallIn) == [], "what waits in it is meant to"


def test_a_new_stream_hears_only_of_this_one_as_begun() -> None:
    w = engine(2, 2, 6)
    w.do(ev.StreamDown())
    hello = w.up()
    assert (seqs(hello.held), seqs(hello.held_started)) == ([0, 1, 2, 3, 4, 5], [0, 1])


def test_what_waits_in_an_engine_can_be_stolen() -> None:
    w = engine(2, 2, 5)
    actions = revoke(w, 7, 2, 3, 4)
    assert of(actions, ev.RecallIn) == [ev.RecallIn(1, [attempt(2), attempt(3)])] and confirmed(actions) == []
    assert confirmed(w.do(ev.ChildReturned(1, [attempt(2), attempt(3)]))) == [(7, [4, 2, 3], [])]
    assert sorted(k.seq for k in w.session.held) == [0, 1]


def test_a_row_that_the_engine_began_meanwhile_is_kept() -> None:
    w = engine(2, 2, 4)
    revoke(w, 7, 2, 3)
    w.end(1, 0)
    assert confirmed(w.do(ev.ChildReturned(1, [attempt(3)]))) == [(7, [3], [2])]
    assert sorted(k.seq for k in w.session.held) == [1, 2]
    w.end(1, 1, 2)
    assert not w.session.held


def test_a_row_that_has_begun_is_kept_at_once() -> None:
    w = engine(2, 2, 2)
    assert confirmed(revoke(w, 7, 0, 1)) == [(7, [], [0, 1])]


def test_an_engine_that_ends_while_it_is_asked_gives_everything_back() -> None:
    w = engine(1, 2, 3)
    revoke(w, 7, 1, 2)
    actions = w.do(ev.ChildEnded(1, "signal SIGSEGV"))
    assert confirmed(actions) == [(7, [1, 2], [])]
    assert not w.session.held, "the row that ran is a failed attempt"


def test_a_revoke_does_not_outlive_its_stream() -> None:
    w = engine(1, 1, 2)
    revoke(w, 7, 1)
    w.do(ev.StreamDown())
    hello = w.up()
    assert seqs(hello.held) == [0, 1]
    w.down(welcome=work_pb2.Welcome())
    actions = w.do(ev.ChildReturned(1, [attempt(1)]))
    assert confirmed(actions) == [] and delivered(actions) == {1: [1]}, "it is held, so it runs here"


def test_pause_and_drain_take_back_what_waits_in_an_engine() -> None:
    for pause in (True, False):
        w = engine(1, 2, 3)
        w.flush()
        actions: list[Any] = w.down(pause=work_pb2.Pause(run_id=RUN)) if pause else w.do(ev.Drain("operator", 60))
        assert of(actions, ev.RecallIn) == [ev.RecallIn(1, [attempt(1), attempt(2)])]
        actions = [*w.do(ev.ChildReturned(1, [attempt(1), attempt(2)])), *w.do(ev.Flush())]
        assert [seqs(f.released.keys) for f in w.sent(actions) if f.HasField("released")] == [[1, 2]]
