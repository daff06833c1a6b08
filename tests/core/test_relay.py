"""The relay between gateways and replicas: who hears what, and what is dropped."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from rollout.model.errors import InputError, ProtocolError, UnavailableError
from rollout.wire.pieces import MESSAGE_MAX, PIECE_MAX, Assembly, pieces
from rollout.wire.v1 import serve_pb2, work_pb2
from rollout_coordinator.http.metrics import Metrics
from rollout_coordinator.relay import UNREAD_MAX, Gateway, Relay, ReplicaId
from rollout_coordinator.sessions import Outbox, Session

A, B = ReplicaId(1, 0, 1), ReplicaId(1, 1, 1)


class World:
    def __init__(self) -> None:
        self.metrics = Metrics()
        self.relay = Relay(self.metrics)
        self.worker, self.other = Session("S1", "W1"), Session("S2", "W2")

    def open(self, run: str = "R") -> Gateway:
        gateway = self.relay.open(run, epoch=3)
        assert taken(gateway.outbox)[0].HasField("opened")
        return gateway

    def ask(self, gateway: Gateway, id: ReplicaId, data: bytes) -> Outbox | None:
        return self.relay.to_replica(gateway, serve_pb2.ReplicaData(replica=id.to_wire(), data=data))

    def say(self, session: Session, id: ReplicaId, channel: int, data: bytes) -> None:
        said = work_pb2.RelayData(replica=id.to_wire(), channel=channel, data=data)
        self.relay.from_replica(session, said)


def taken(outbox: Outbox) -> list[Any]:
    found: list[Any] = []
    while (frame := outbox.take_nowait()) is not None:
        found.append(frame)
    return found


def kinds(outbox: Outbox) -> list[str]:
    """What was put, and whom it is about."""
    found: list[str] = []
    for frame in taken(outbox):
        body = frame.WhichOneof("body")
        about = getattr(frame, body)
        draining = " draining" if body == "down" and about.draining else ""
        found.append(f"{body} {about.replica.seq}{draining}")
    return found


def test_a_gateway_hears_of_the_replicas_of_its_run_before_and_after_it_came() -> None:
    w = World()
    w.relay.announce(w.worker, "R", A, "W1/1")
    w.relay.announce(w.worker, "elsewhere", ReplicaId(2, 0, 1), "W1/1")
    w.relay.withdraw(w.worker, A, draining=True)
    gateway = w.relay.open("R", epoch=3)
    first = taken(gateway.outbox)
    assert [f.WhichOneof("body") for f in first] == ["opened", "up", "down"]
    assert (first[1].up.worker, first[1].up.engine) == ("W1", "W1/1")
    w.relay.announce(w.other, "R", B, "W2/1")
    w.relay.withdraw(w.worker, A, draining=False)
    w.relay.session_ended(w.other)
    assert kinds(gateway.outbox) == ["up 1", "down 0", "down 1"]


def test_a_replica_answers_to_the_channel_that_asked() -> None:
    w = World()
    one, two = w.open(), w.open()
    w.relay.announce(w.worker, "R", A, "e")
    assert kinds(one.outbox) == kinds(two.outbox) == ["up 0"]
    assert w.ask(two, A, b"question") is w.worker.outbox
    (heard,) = taken(w.worker.outbox)
    assert (heard.heard.channel, heard.heard.data) == (two.channel, b"question")
    w.say(w.worker, A, heard.heard.channel, b"answer")
    assert [f.data.data for f in taken(two.outbox)] == [b"answer"]
    assert not taken(one.outbox)


def test_what_is_not_theirs_reaches_nobody() -> None:
    w = World()
    gateway, stranger = w.open(), w.open("elsewhere")
    w.relay.announce(w.worker, "R", A, "e")
    taken(gateway.outbox)
    assert w.ask(stranger, A, b"a replica of another run") is None
    assert w.ask(gateway, B, b"a replica that nobody announced") is None
    w.say(w.other, A, gateway.channel, b"a replica of another worker")
    w.say(w.worker, A, stranger.channel, b"a gateway of another run")
    w.say(w.worker, A, 7, b"a channel that nobody has")
    w.relay.withdraw(w.other, A, draining=False)
    assert not [f for o in (gateway, stranger, w.worker, w.other) for f in taken(o.outbox)]


def test_a_gateway_that_goes_hangs_up_with_the_replicas_of_its_run() -> None:
    w = World()
    gateway = w.open()
    w.relay.announce(w.worker, "R", A, "e")
    w.relay.announce(w.other, "elsewhere", B, "e")
    w.relay.close(gateway)
    w.relay.close(gateway)
    (hung_up,) = taken(w.worker.outbox)
    assert hung_up.hung_up.channel == gateway.channel and not taken(w.other.outbox)
    assert w.open().channel != gateway.channel, "late answers must find nobody"
    assert w.relay.open("R", epoch=4).channel >> 32 == 4, "nor somebody of a later leader"


def test_an_announcement_on_a_new_stream_is_a_new_replica() -> None:
    """The old stream may not be known to have ended, and its end must not take the new one down."""
    w = World()
    gateway = w.open()
    w.relay.announce(w.worker, "R", A, "e")
    again = Session("S9", "W1")
    w.relay.announce(again, "R", A, "e")
    w.relay.session_ended(w.worker)
    assert kinds(gateway.outbox) == ["up 0", "down 0", "up 0"]
    assert w.ask(gateway, A, b"x") is again.outbox


def test_a_gateway_that_does_not_read_is_closed_and_others_go_on() -> None:
    w = World()
    slow, quick = w.open(), w.open()
    w.relay.announce(w.worker, "R", A, "e")
    for _ in range(UNREAD_MAX // PIECE_MAX + 1):
        w.say(w.worker, A, slow.channel, bytes(PIECE_MAX))
    assert isinstance(slow.outbox.closed, UnavailableError) and slow.outbox.failed.is_set()
    assert not taken(slow.outbox) and slow.outbox.data_bytes == 0
    w.say(w.worker, A, quick.channel, b"x")
    assert kinds(quick.outbox) == ["up 0", "data 0"]


def test_a_piece_that_is_too_large_breaks_the_protocol() -> None:
    w = World()
    gateway = w.open()
    w.relay.announce(w.worker, "R", A, "e")
    with pytest.raises(ProtocolError):
        w.ask(gateway, A, bytes(PIECE_MAX + 1))
    with pytest.raises(ProtocolError):
        w.say(w.worker, A, gateway.channel, bytes(PIECE_MAX + 1))


def test_the_end_of_leadership_closes_every_gateway() -> None:
    w = World()
    gateways = [w.open(), w.open("elsewhere")]
    w.relay.close_all(UnavailableError("deposed"))
    assert all(g.outbox.closed is not None and g.outbox.failed.is_set() for g in gateways)


def test_streams_and_bytes_are_counted() -> None:
    w = World()
    gateway = w.open()
    w.relay.announce(w.worker, "R", A, "e")
    w.ask(gateway, A, b"123")
    w.say(w.worker, A, gateway.channel, b"12345")
    page = w.metrics.render().decode()
    assert "rollout_gateway_streams 1.0" in page
    assert 'rollout_relayed_bytes_total{direction="down"} 3.0' in page
    assert 'rollout_relayed_bytes_total{direction="up"} 5.0' in page


async def test_no_send_waits_for_data_and_who_fills_an_outbox_can_wait_for_room() -> None:
    outbox = Outbox()
    outbox.put_data("data", 10)
    outbox.put("send")
    waiting = asyncio.create_task(outbox.room(5))
    assert await outbox.take() == "send"
    assert outbox.data_bytes == 10 and not waiting.done()
    assert await outbox.take() == "data"
    await waiting
    outbox.put_data("data", 10)
    waiting = asyncio.create_task(outbox.room(5))
    await asyncio.sleep(0)
    outbox.close(UnavailableError("gone"))
    await waiting
    assert await outbox.take() is None


def test_a_message_is_cut_and_whole_again_beside_those_of_others() -> None:
    whole = bytes(range(256)) * (PIECE_MAX // 256) * 2 + b"rest"
    assembly = Assembly[str]()
    got: list[bytes | None] = []
    for piece, more in pieces(whole):
        got.append(assembly.add("a", piece, more))
        assert assembly.add("b", b"b", False) == b"b"
    assert got == [None, None, whole]
    assert list(pieces(b"")) == [(b"", False)]
    assembly.add("a", b"lost", True)
    assembly.forget("a")
    assert assembly.add("a", b"x", False) == b"x"
    with pytest.raises(InputError):
        list(pieces(bytes(MESSAGE_MAX + 1)))
