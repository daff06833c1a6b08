"""Replicas in a worker's session: what their processes may say, and who hears of their end."""

from __future__ import annotations

from typing import Any

import pytest
from rollout.model.errors import ProtocolError
from rollout.wire.pieces import PIECE_MAX
from rollout.wire.v1 import common_pb2, work_pb2
from rollout_worker import session_events as ev
from rollout_worker.attempts import AttemptKey
from rollout_worker.processes.frames import read_frame
from rollout_worker.processes.kinds import Kind
from session_world import LOG, RUN, Worker, keys, of

FIRST = AttemptKey(LOG, 0, 1)
KEY = common_pb2.ReplicaKey(log=LOG, seq=0, attempt=1)
ANNOUNCE: dict[str, Any] = {"announce": work_pb2.Announce(run_id="another", replica=KEY, engine="another")}
SAID: dict[str, Any] = {"said": work_pb2.RelayData(replica=KEY, channel=5, data=b"x")}
HEARD: dict[str, Any] = {"heard": work_pb2.RelayData(replica=KEY, channel=5, data=b"x")}
WITHDRAW: dict[str, Any] = {"withdraw": work_pb2.Withdraw(replica=KEY)}
DRAINING: dict[str, Any] = {"withdraw": work_pb2.Withdraw(replica=KEY, draining=True)}


def busy() -> Worker:
    """Its process, number 1, runs item 0."""
    w = Worker(slots=1, self_fence_s=1e9)
    w.assign([0], workload="infer")
    w.ready(width=1)
    w.do(ev.Flush())
    return w


def says(w: Worker, child: int = 1, key: AttemptKey = FIRST, **body: Any) -> list[work_pb2.WorkUp]:
    """What the coordinator hears of it."""
    return relayed(w.do(ev.ChildRelays(child, key, work_pb2.WorkUp(**body))))


def relayed(actions: list[ev.Action]) -> list[work_pb2.WorkUp]:
    return [action.frame for action in of(actions, ev.Relay)]


def bodies(frames: list[work_pb2.WorkUp]) -> list[str | None]:
    return [frame.WhichOneof("body") for frame in frames]


def test_a_replica_is_announced_as_what_the_worker_knows_it_to_be() -> None:
    w = busy()
    (frame,) = says(w, **ANNOUNCE)
    assert (frame.announce.run_id, frame.announce.engine, frame.announce.replica) == (RUN, "W/1", KEY)
    assert bodies(says(w, **SAID)) == ["said"]
    (heard,) = of(w.down(**HEARD), ev.RelayIn)
    assert heard.child == 1 and heard.frame.heard.data == b"x"
    hung_up = work_pb2.HungUp(replica=KEY, channel=5)
    assert of(w.down(hung_up=hung_up), ev.RelayIn)[0].frame.hung_up == hung_up
    assert bodies(says(w, **DRAINING)) == ["withdraw"] and bodies(says(w, **SAID)) == ["said"]
    assert bodies(says(w, **WITHDRAW)) == ["withdraw"]
    assert not says(w, **SAID) and not of(w.down(**HEARD), ev.RelayIn)


@pytest.mark.parametrize(
    ("child", "key"), [(1, AttemptKey(LOG, 1, 1)), (1, AttemptKey(LOG, 0, 2)), (2, FIRST)], ids=str
)
def test_a_process_speaks_only_for_what_it_has_in_hand(child: int, key: AttemptKey) -> None:
    w = busy()
    says(w, **ANNOUNCE)
    for body in (ANNOUNCE, SAID, WITHDRAW):
        assert not says(w, child, key, **body)
    assert bodies(says(w, **SAID)) == ["said"]


def test_nothing_that_is_relayed_hurries_results() -> None:
    w = Worker(slots=1, self_fence_s=1e9)
    w.assign([0], workload="infer")
    w.ready(width=1)
    assert w.session.wants_flush, "that it started is still to be told"
    w.do(ev.ChildRelays(1, FIRST, work_pb2.WorkUp(**ANNOUNCE)))
    assert not w.sent(w.do(ev.ChildRelays(1, FIRST, work_pb2.WorkUp(**SAID)))) and w.session.wants_flush


def test_the_end_of_the_attempt_or_of_its_process_withdraws_it() -> None:
    ended, crashed = busy(), busy()
    for w in (ended, crashed):
        says(w, **ANNOUNCE)
    assert bodies(relayed(ended.end(1, 0))) == ["withdraw"]
    assert bodies(relayed(crashed.do(ev.ChildEnded(1, "killed")))) == ["withdraw"]
    assert len(ended.session.replicas) == len(crashed.session.replicas) == 0


def test_a_lost_coordinator_hangs_up_and_the_next_welcome_is_followed_by_what_was_announced_since() -> None:
    w = busy()
    says(w, **ANNOUNCE)
    (told,) = of(w.do(ev.StreamDown()), ev.RelayIn)
    assert told.frame.hung_up.channel == 0
    assert not says(w, **SAID), "from before it knew: no channel of the next coordinator may get it"
    assert not says(w, **ANNOUNCE), "there is nobody to hear it yet"
    w.up()
    welcomed = relayed(w.down(welcome=work_pb2.Welcome(keep=keys(0))))
    assert bodies(welcomed) == ["announce"]
    assert bodies(says(w, **SAID)) == ["said"]


def test_one_that_drained_meanwhile_is_announced_as_that() -> None:
    w = busy()
    w.do(ev.StreamDown())
    says(w, **ANNOUNCE)
    says(w, **DRAINING)
    w.up()
    announced = relayed(w.down(welcome=work_pb2.Welcome(keep=keys(0))))
    assert bodies(announced) == ["announce", "withdraw"] and announced[1].withdraw.draining


def test_one_that_is_stopped_answers_on_and_is_announced_no_more() -> None:
    w = busy()
    says(w, **ANNOUNCE)
    w.down(cancel=work_pb2.Cancel(keys=keys(0)))
    assert bodies(says(w, **SAID)) == ["said"]
    w.do(ev.StreamDown())
    assert not says(w, **ANNOUNCE) and len(w.session.replicas) == 0


def test_a_fenced_worker_says_nothing() -> None:
    w = Worker(slots=1, self_fence_s=4.0)
    w.assign([0], workload="infer")
    w.ready(width=1)
    says(w, **ANNOUNCE)
    w.tick(5.0)
    assert not says(w, **SAID)


@pytest.mark.parametrize(
    "frame",
    [
        work_pb2.WorkUp(),
        work_pb2.WorkUp(goodbye=work_pb2.Goodbye()),
        work_pb2.WorkUp(said=work_pb2.RelayData(replica=KEY, data=bytes(PIECE_MAX + 1))),
        work_pb2.WorkUp(withdraw=work_pb2.Withdraw(replica=common_pb2.ReplicaKey(log=1 << 63))),
    ],
    ids=["nothing", "goodbye", "large", "huge"],
)
def test_what_a_replica_may_not_say_breaks_the_protocol(frame: work_pb2.WorkUp) -> None:
    with pytest.raises(ProtocolError):
        read_frame(1, Kind.RELAY, frame.SerializeToString())
    assert read_frame(1, Kind.RELAY, work_pb2.WorkUp(**SAID).SerializeToString()) == ev.ChildRelays(
        1, FIRST, work_pb2.WorkUp(**SAID)
    )
