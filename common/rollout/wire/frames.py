"""Frames of a Work or Serve stream in as few messages as hold them.

Each message costs its reader and its writer some 70 µs, whatever it carries (ADR 0013), and a worker whose rows take
seconds reports one or two at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from rollout.model.errors import ProtocolError
from rollout.wire.v1 import serve_pb2, work_pb2

MESSAGE_BYTES = 64 << 10
"""Maximum bytes of a message of several frames: carrying a frame copies it, and a large one is expensive by itself."""

Frame = TypeVar("Frame", work_pb2.WorkUp, work_pb2.WorkDown, serve_pb2.GatewayUp, serve_pb2.GatewayDown)


def joined(frames: Iterable[Frame]) -> Iterator[Frame]:
    """Yield the messages that carry `frames`, in order.

    It takes from `frames` no more than the next message needs, so a writer that waits between two messages sends what
    came meanwhile with the later one.
    """
    message: Any = None
    size = 0
    for frame in frames:
        if message is None:
            message = frame
            continue
        size = size or message.ByteSize()
        more = frame.ByteSize()
        if size + more > MESSAGE_BYTES:
            yield message
            message, size = frame, more
        else:
            message.then.append(frame)
            size += more
    if message is not None:
        yield message


def frames_of(message: Frame) -> Sequence[Frame]:
    """Return what `joined` put into a message. Raises ProtocolError for a carried frame that carries others."""
    carried: Any = message.then
    if any(frame.then for frame in carried):
        raise ProtocolError("A frame that another carries may not carry frames itself.")
    return (message, *carried)
