"""Messages made from the protobuf descriptors: a new message or field is fuzzed without a line here.

A `Feed` turns any bytes into choices, zero being the tamest of each, so one generator serves hypothesis (whose
shrinking goes towards zero) and a coverage-guided fuzzer. `messages(kind)` gives messages whose fields hold edge values:
absent, empty, the largest, unknown enum numbers, NUL and long text, ids of the wrong size. `wire(kind)` gives the bytes
of such messages, often with unknown fields behind them, cut short, damaged or no message at all. `Known` holds values
that get a message past the first checks, such as the sender's own incarnation, so that what lies behind is reached too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st
from rollout.wire.v1 import (
    common_pb2,
    control_pb2,
    heartbeat_pb2,
    join_pb2,
    objects_pb2,
    plugin_pb2,
    runs_pb2,
    work_pb2,
)

FILES = (common_pb2, control_pb2, heartbeat_pb2, join_pb2, objects_pb2, plugin_pb2, runs_pb2, work_pb2)

Known = Mapping[str, Sequence[Any]]
"""Field name (`seq`) or message and field name (`Hello.incarnation`) to the values it mostly has, the tamest first; none:
it is mostly absent. A function gives the value for a message of so many rows: columns mostly agree."""

T = TypeVar("T")
DEPTH = 4
REPEAT = 3
FEED_BYTES = 192

RUN_ID = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
_UNSIGNED = (0, 1, 2, 3, 5, 255, 1 << 31, (1 << 32) - 1)
_WIDE = (*_UNSIGNED, 1 << 32, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
_SIGNED = (0, 1, -1, 7, -(1 << 31), (1 << 31) - 1)
_SIGNED_WIDE = (*_SIGNED, -(1 << 63), (1 << 63) - 1)
_DOUBLES = (0.0, 1.0, -1.0, 0.5, 1e308, -1e308, 5e-324, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "a", "x\x00y", "\ufffd", "Ü\U0001f600", RUN_ID, RUN_ID.lower(), "slots", "../..", "L" * 3000, '{"a":')
_BLOBS = (b"", b"x", bytes(32), b"\xff" * 32, b"y" * 31, b"z" * 64, b"{}", b"[" * 2000, b'{"a":' * 400)

_F = FieldDescriptor
_EDGES: dict[int, Sequence[Any]] = {
    _F.TYPE_UINT32: _UNSIGNED,
    _F.TYPE_UINT64: _WIDE,
    _F.TYPE_SINT32: _SIGNED,
    _F.TYPE_INT32: _SIGNED,
    _F.TYPE_SINT64: _SIGNED_WIDE,
    _F.TYPE_INT64: _SIGNED_WIDE,
    _F.TYPE_DOUBLE: _DOUBLES,
    _F.TYPE_BOOL: (False, True),
    _F.TYPE_STRING: _TEXTS,
    _F.TYPE_BYTES: _BLOBS,
    _F.TYPE_ENUM: (0, 1, 2, 3, 4, 5, 99, -1, (1 << 31) - 1),
}
# Fields nobody knows: a varint, fixed 64 and 32, bytes, a group, an end of group, field 0, a length of 4 GiB.
_UNKNOWN = (
    b"\xf8\x7f\x01", b"\xf9\x7f" + bytes(8), b"\xfd\x7f" + bytes(4), b"\xfa\x7f\x03abc", b"\xfb\x7f\xfc\x7f",
    b"\xfc\x7f", b"\x00\x01", b"\xfa\x7f\xff\xff\xff\xff\x0f",
)  # fmt: skip


class Feed:
    """Choices out of bytes; when they are used up, every choice is the tamest."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def byte(self) -> int:
        at, self._at = self._at, self._at + 1
        return self._data[at] if at < len(self._data) else 0

    def below(self, n: int) -> int:
        return (self.byte() if n <= 256 else self.byte() << 8 | self.byte()) % n

    def pick(self, values: Sequence[T]) -> T:
        return values[self.below(len(values))]

    def take(self, n: int) -> bytes:
        return bytes(self.byte() for _ in range(n))


def kinds() -> list[type[Message]]:
    """Every message type of the wire."""
    return [
        message_factory.GetMessageClass(descriptor)
        for file in FILES
        for descriptor in file.DESCRIPTOR.message_types_by_name.values()
    ]


def _value(feed: Feed, field: FieldDescriptor, known: Known, depth: int, rows: int = 1) -> Any:
    likely = _likely(field, known)
    if likely and feed.byte() < 224:
        value = feed.pick(likely)
        return value(rows) if callable(value) else value
    if field.message_type is not None:
        return build(message_factory.GetMessageClass(field.message_type), feed, known, depth - 1)
    edges = _EDGES[field.type]
    at = feed.below(len(edges) + 2)
    if at < len(edges):
        return edges[at]
    if field.type == _F.TYPE_STRING:
        return feed.take(feed.below(12)).decode(errors="replace")
    if field.type == _F.TYPE_BYTES:
        return feed.take(feed.below(40))
    return edges[feed.below(2)]


def _likely(field: FieldDescriptor, known: Known) -> Sequence[Any] | None:
    assert field.containing_type is not None
    return known.get(f"{field.containing_type.name}.{field.name}", known.get(field.name))


def build(kind: type[Message], feed: Feed, known: Known | None = None, depth: int = DEPTH) -> Any:
    known = known or {}
    message = kind()
    rows = 1 + feed.below(REPEAT)
    descriptor: Any = kind.DESCRIPTOR
    chosen = {
        oneof.name: feed.pick(oneof.fields) for oneof in descriptor.oneofs if not oneof.name.startswith("_")
    }  # fmt: skip
    for field in descriptor.fields:
        if field.message_type is not None and depth <= 0:
            continue
        group = field.containing_oneof
        if group is not None and group.name in chosen:
            if chosen[group.name] is field:
                _set(feed, message, field, known, depth, rows)
            continue
        presence, likely = feed.byte(), _likely(field, known)
        if presence & 1 if likely is None else presence < 244 if likely else presence > 244:
            _set(feed, message, field, known, depth, rows)
    return message


def _set(feed: Feed, message: Message, field: FieldDescriptor, known: Known, depth: int, rows: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        target = getattr(message, field.name)
        for _ in range(feed.below(3)):
            name, drawn = _value(feed, key, known, depth), _value(feed, value, known, depth)
            target[name].CopyFrom(drawn) if value.message_type is not None else target.__setitem__(name, drawn)
    elif field.is_repeated:
        count = feed.below(REPEAT + 1) if feed.byte() > 236 or field.message_type is not None else rows
        getattr(message, field.name).extend([_value(feed, field, known, depth) for _ in range(count)])
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(_value(feed, field, known, depth))
    else:
        setattr(message, field.name, _value(feed, field, known, depth, rows))


def damage(feed: Feed, data: bytes) -> bytes:
    """The bytes as they are (mostly), with unknown fields, cut, with a byte changed, doubled, or garbage instead."""
    how = feed.below(10)
    if how == 1:
        return data + feed.pick(_UNKNOWN)
    if how == 2 and data:
        return data[: feed.below(len(data))]
    if how == 3 and data:
        at = feed.below(len(data))
        return data[:at] + bytes([data[at] ^ (feed.byte() or 1)]) + data[at + 1 :]
    if how == 4:
        return data + data
    if how == 5:
        return feed.take(feed.below(64))
    return data


def feeds(size: int = FEED_BYTES) -> st.SearchStrategy[Feed]:
    return st.binary(min_size=size, max_size=size).map(Feed)


def messages(kind: type[Message], known: Known | None = None, depth: int = DEPTH) -> st.SearchStrategy[Any]:
    return feeds().map(lambda feed: build(kind, feed, known, depth))


def wire_of(kind: type[Message], feed: Feed, known: Known | None = None) -> bytes:
    how = Feed(feed.take(6))
    return damage(how, build(kind, feed, known).SerializeToString())


def wire(kind: type[Message], known: Known | None = None) -> st.SearchStrategy[bytes]:
    return feeds().map(lambda feed: wire_of(kind, feed, known))
