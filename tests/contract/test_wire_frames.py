"""Several frames in one message: which go together, in which order, and what a reader refuses."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout.model.errors import ProtocolError
from rollout.wire.frames import MESSAGE_BYTES, frames_of, joined
from rollout.wire.v1 import work_pb2


def frame(number: int, size: int = 0) -> work_pb2.WorkUp:
    return work_pb2.WorkUp(epoch=number, session="S", progress=work_pb2.Progress(note="x" * size))


def read(messages: list[work_pb2.WorkUp]) -> list[work_pb2.WorkUp]:
    """As the peer has them."""
    return [carried for sent in messages for carried in frames_of(work_pb2.WorkUp.FromString(sent.SerializeToString()))]


@given(st.lists(st.sampled_from([0, 10, 1000, MESSAGE_BYTES // 3, MESSAGE_BYTES - 100, MESSAGE_BYTES * 3])))
def test_all_arrive_in_order_in_messages_of_a_size(sizes: list[int]) -> None:
    messages = list(joined(frame(*one) for one in enumerate(sizes)))
    got = read(messages)
    assert [(f.epoch, len(f.progress.note)) for f in got[: len(sizes)]] == list(enumerate(sizes))
    assert all(f.session == "S" for f in got)
    for message in messages:
        assert not message.then or message.ByteSize() <= MESSAGE_BYTES * 1.1, "64 KiB and the lengths of its frames"
    for before, after in pairwise(messages):
        assert before.ByteSize() + frames_of(after)[0].ByteSize() > MESSAGE_BYTES * 0.9, "no more messages than needed"


def test_nothing_to_send_is_no_message() -> None:
    none: list[work_pb2.WorkUp] = []
    assert not list(joined(none))


def test_what_comes_while_a_message_is_written_goes_with_the_next() -> None:
    queue = [frame(1), frame(2, MESSAGE_BYTES)]

    def queued() -> Iterator[work_pb2.WorkUp]:
        while queue:
            yield queue.pop(0)

    messages = joined(queued())
    assert [f.epoch for f in frames_of(next(messages))] == [1], "the second finds no place"
    queue += [frame(3, MESSAGE_BYTES), frame(4), frame(5)]
    assert [[f.epoch for f in frames_of(m)] for m in messages] == [[2], [3], [4, 5]]


def test_a_frame_that_is_carried_carries_none() -> None:
    message = frame(1)
    message.then.add(epoch=2, session="S").then.add(epoch=3, session="S")
    with pytest.raises(ProtocolError, match="may not carry frames itself"):
        frames_of(message)
