"""Frames between gateway and replica: what is written is read again, what is none is refused, few frames carry many."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rollout.model.errors import ProtocolError
from rollout.workloads.serve.frames import (
    FRAME_BYTES,
    GATHER_S,
    Ask,
    Begin,
    ChoiceDelta,
    ChoiceEnd,
    Coalescer,
    Deltas,
    End,
    Fault,
    FromReplica,
    Stop,
    ToReplica,
    Vectors,
    encoded,
    frames_of,
    from_replica,
    to_replica,
)

CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ASKS: list[ToReplica] = [
    Ask(1, "/v1/chat/completions", {"messages": [{"role": "user", "content": "ä\ud800"}]}, ((1, 2), ())),
    Ask(2, "/v1/completions", {"prompt": "x"}),
    Stop(1),
]
ANSWERS: list[FromReplica] = [
    Begin(1, 12),
    Deltas(1, (ChoiceDelta(0, (5,), "Hé"), ChoiceDelta(1, (), "", "hm", (CALL,), ({"token": "a", "logprob": -1.0},)))),
    Vectors(2, ((0.5, -1.0), (1.0, 0.0))),
    End(1, (ChoiceEnd(0, "stop", 3), ChoiceEnd(1, "tool_calls", 4, "no", "hm")), 12, 7),
    Fault(3, "bad_request", "no", 400, False),
]


class _Clock:
    def __init__(self) -> None:
        self.now = 5.0
        self.due: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None], /) -> None:
        self.due.append((self.now + delay, callback))

    def pass_s(self, seconds: float) -> None:
        self.now += seconds
        ready, self.due = (
            [one for one in self.due if one[0] <= self.now],
            [one for one in self.due if one[0] > self.now],
        )
        for _, callback in ready:
            callback()


def test_messages_are_read_as_they_were_written() -> None:
    (asks,) = frames_of(map(encoded, ASKS))
    (answers,) = frames_of(map(encoded, ANSWERS))
    assert to_replica(asks) == ASKS
    assert from_replica(answers) == ANSWERS


@pytest.mark.parametrize(
    "frame",
    [
        b"{", b"{}", b"[1]", b'[{"id": 1}]', b'[{"stop": true}]', b'[{"id": -1, "stop": true}]',
        b'[{"id": true, "stop": true}]', b'[{"id": 1, "ask": {"url": "/v1/completions"}}]',
        b'[{"id": 1, "ask": {"url": "x", "body": {}, "so_far": [["a"]]}}]', b'[{"id": 1, "begin": {"prompt_tokens": 1}}]',
        b"[" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_frame_of_a_gateway_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        to_replica(frame)


@pytest.mark.parametrize(
    "message",
    [
        b'{"id": 1, "delta": [{"i": 0, "text": 1}]}', b'{"id": 1, "delta": [{}]}', b'{"id": 1, "vectors": [["a"]]}',
        b'{"id": 1, "end": {"choices": []}}', b'{"id": 1, "fault": {"code": "a", "message": "", "status": 400}}',
        b'{"id": 1, "stop": true}',
    ],
)  # fmt: skip
def test_what_is_no_frame_of_a_replica_is_refused(message: bytes) -> None:
    with pytest.raises(ProtocolError):
        from_replica(b"[" + message + b"]")


def test_the_first_message_goes_at_once_and_those_soon_after_it_together() -> None:
    sent: list[bytes] = []
    clock = _Clock()
    gathers = Coalescer(sent.append, clock)
    gathers.add(Begin(1, 1))
    assert [len(from_replica(frame)) for frame in sent] == [1]
    for _ in range(3):
        gathers.add(Deltas(1, ()))
    assert len(sent) == 1
    clock.pass_s(GATHER_S)
    assert [len(from_replica(frame)) for frame in sent] == [1, 3]
    clock.pass_s(2 * GATHER_S)
    gathers.add(End(1))
    assert len(sent) == 3


def test_no_frame_is_larger_than_the_wire_takes() -> None:
    messages: list[FromReplica] = [Deltas(at, (ChoiceDelta(0, text="x" * (FRAME_BYTES // 3)),)) for at in range(5)]
    frames = list(frames_of(map(encoded, messages)))
    assert max(map(len, frames)) <= FRAME_BYTES
    assert [one for frame in frames for one in from_replica(frame)] == messages
    with pytest.raises(ProtocolError):
        Coalescer(lambda _: None, _Clock()).add(Deltas(1, (ChoiceDelta(0, text="x" * FRAME_BYTES),)))
