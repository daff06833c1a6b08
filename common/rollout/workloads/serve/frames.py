"""Messages between a gateway and the replicas that serve its requests, and the bytes that carry them.

A frame is a JSON list of messages. Each message names its request by `id`, a number that the gateway gives, unique
within its stream: the channel and `id` together name a request at a replica.

    [{"id": 7, "ask": {"url": "/v1/chat/completions", "body": {...}}}]                       gateway -> replica
    [{"id": 7, "begin": {"prompt_tokens": 12}}, {"id": 7, "delta": [{"i": 0, "ids": [..], "text": "Hel"}]}]  and back
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

from rollout.model.errors import ProtocolError
from rollout.workloads.json_form import JsonObject

FRAME_BYTES = 4 << 20
"""Maximum size of a frame in bytes, as the wire protocol allows."""
CANNOT_CONTINUE = "cannot_continue"
"""Fault code of an engine that cannot continue after `so_far`."""
GATHER_S = 0.01
"""Messages of this period share a frame. A frame costs each process on its way some 70 µs (ADR 0013), and a busy engine
has a message for each request every few milliseconds."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Answer a request. `url` and `body` are as an OpenAI client sends them. `so_far` has, for each choice, the token
    ids that another replica generated; the answer continues after them. Sampling continues identically only if `body`
    has a seed and the engine can resume a random sequence (transformers can)."""

    id: int
    url: str
    body: JsonObject
    so_far: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Stop:
    """Cancel a request. Messages that are already on their way may still arrive."""

    id: int


@dataclass(frozen=True, slots=True)
class Begin:
    """The engine accepted the request. `prompt_tokens` is 0 if only the end reports it."""

    id: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """New output of choice `i`. `ids` has every token as soon as it is generated; text may follow later. After
    `so_far`, only new output is sent. `tool_calls` are whole calls as in an OpenAI message. `logprobs` has for each of
    `ids` {"token", "logprob", "top": [{"token", "logprob"}]}."""

    i: int
    ids: tuple[int, ...] = ()
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[JsonObject, ...] = ()
    logprobs: tuple[JsonObject, ...] = ()


@dataclass(frozen=True, slots=True)
class Deltas:
    id: int
    choices: tuple[ChoiceDelta, ...]


@dataclass(frozen=True, slots=True)
class Vectors:
    """Embeddings of the next inputs, in order. Large ones are split over several messages."""

    id: int
    vectors: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """The end of a choice. `finish_reason` is stop, length, tool_calls, or the forwarded server's own. `tokens` counts
    all generated tokens including `so_far`. `stop_reason` is the stop string or token id that ended the text."""

    i: int
    finish_reason: str
    tokens: int
    refusal: str | None = None
    note: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class End:
    """The last message of an answered request. Answers with vectors have no choices."""

    id: int
    choices: tuple[ChoiceEnd, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """The last message of a failed request. `status` is the matching HTTP status; below 500 the request is at fault and
    the engine is not blamed. `retry` means that another replica, or this one later, may succeed."""

    id: int
    code: str
    message: str
    status: int
    retry: bool


ToReplica = Ask | Stop
FromReplica = Begin | Deltas | Vectors | End | Fault
Message = ToReplica | FromReplica


# Made once: `json.dumps` with options makes one for each call.
_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def encoded(message: Message) -> bytes:
    """Encode one message as JSON, for `frames_of`."""
    name, value = _body(message)
    # A model may write half of a surrogate pair; `json.loads` reads one back.
    return _json({"id": message.id, name: value}).encode("utf-8", "surrogatepass")


def frames_of(messages: Iterable[bytes]) -> Iterator[bytes]:
    """Pack encoded messages into as few frames as possible, in order. Raises ProtocolError if one exceeds a frame."""
    gathered: list[bytes] = []
    size = 1
    for message in messages:
        if len(message) + 2 > FRAME_BYTES:
            raise ProtocolError(f"a message of {len(message)} bytes is larger than a frame ({FRAME_BYTES})")
        if gathered and size + len(message) + 1 > FRAME_BYTES:
            yield b"[" + b",".join(gathered) + b"]"
            gathered, size = [], 1
        gathered.append(message)
        size += len(message) + 1
    if gathered:
        yield b"[" + b",".join(gathered) + b"]"


EMPTY = b"[]"
"""The frame by which a gateway makes itself known to a replica, and which a replica sends to each known gateway every
BEAT_S."""
BEAT_S = 5.0


def to_replica(frame: bytes) -> list[ToReplica]:
    """Decode a gateway's frame. Raises ProtocolError."""
    return [cast(ToReplica, one) for one in _decoded(frame, _TO_REPLICA)]


def from_replica(frame: bytes) -> list[FromReplica]:
    """Decode a replica's frame. Raises ProtocolError."""
    return [cast(FromReplica, one) for one in _decoded(frame, _FROM_REPLICA)]


class Timers(Protocol):
    """The timer methods of an event loop."""

    def time(self) -> float: ...

    def call_later(self, delay: float, callback: Callable[[], None], /) -> Any: ...


_AT_ONCE = Ask | Begin | End | Fault


@dataclass(slots=True)
class Coalescer:
    """Gathers messages into frames. A message is sent at once if nothing was sent in the last GATHER_S, otherwise when
    that time has passed. The begin and end of a request never wait, and flush what does.

    `send` gets each frame. It is called within `add`, or by `timers`.
    """

    send: Callable[[bytes], None]
    timers: Timers
    _waiting: list[bytes] = field(default_factory=list[bytes])
    _sent_at: float = float("-inf")
    _armed: bool = False

    def add(self, *messages: Message) -> None:
        """Queue messages, together in one frame if they fit. If one exceeds a frame, raises ProtocolError and sends
        none."""
        given = [encoded(message) for message in messages]
        if (size := max(map(len, given), default=0)) + 2 > FRAME_BYTES:
            raise ProtocolError(f"a message of {size} bytes is larger than a frame ({FRAME_BYTES})")
        self._waiting += given
        if any(isinstance(message, _AT_ONCE) for message in messages):
            self.flush()
        if self._armed or not self._waiting:
            return
        left = self._sent_at + GATHER_S - self.timers.time()
        if left <= 0:
            self.flush()
        else:
            self._armed = True
            self.timers.call_later(left, self._due)

    def flush(self) -> None:
        """Send all waiting messages now."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._sent_at = self.timers.time()
        for frame in frames_of(waiting):
            self.send(frame)

    def _due(self) -> None:
        self._armed = False
        self.flush()


def _body(message: Message) -> tuple[str, Any]:
    match message:
        case Ask():
            asked: JsonObject = {"url": message.url, "body": message.body}
            return "ask", asked | ({"so_far": message.so_far} if message.so_far else {})
        case Stop():
            return "stop", True
        case Begin():
            return "begin", {"prompt_tokens": message.prompt_tokens}
        case Deltas():
            return "delta", [_delta(one) for one in message.choices]
        case Vectors():
            return "vectors", message.vectors
        case End():
            usage = {"prompt_tokens": message.prompt_tokens, "completion_tokens": message.completion_tokens}
            return "end", {"choices": [_end(one) for one in message.choices], "usage": usage}
        case Fault():
            keys = ("code", "message", "status", "retry")
            return "fault", {key: getattr(message, key) for key in keys}


def _delta(choice: ChoiceDelta) -> JsonObject:
    fields: JsonObject = {"i": choice.i}
    if choice.ids:
        fields["ids"] = choice.ids
    if choice.text:
        fields["text"] = choice.text
    if choice.reasoning:
        fields["reasoning"] = choice.reasoning
    if choice.tool_calls:
        fields["tool_calls"] = choice.tool_calls
    if choice.logprobs:
        fields["logprobs"] = choice.logprobs
    return fields


def _end(choice: ChoiceEnd) -> JsonObject:
    found: JsonObject = {"i": choice.i, "finish_reason": choice.finish_reason, "tokens": choice.tokens}
    said = {"refusal": choice.refusal, "note": choice.note, "stop_reason": choice.stop_reason}
    return found | {key: value for key, value in said.items() if value is not None}


# ---- reading

_TO_REPLICA = frozenset({"ask", "stop"})
_FROM_REPLICA = frozenset({"begin", "delta", "vectors", "end", "fault"})
T = TypeVar("T")


def _decoded(frame: bytes, known: frozenset[str]) -> list[Message]:
    try:
        given: Any = json.loads(frame)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a frame is no JSON: {error}") from None
    return [_message(one, known) for one in _list(given, "a frame")]


def _message(given: Any, known: frozenset[str]) -> Message:
    fields = _object(given, "a message")
    number = _count(fields, "id")
    names = [name for name in known if name in fields]
    if len(names) != 1:
        raise ProtocolError(f"a message must have one of {', '.join(sorted(known))}")
    value = fields[names[0]]
    match names[0]:
        case "ask":
            asked = _object(value, "ask")
            so_far = tuple(_ids(ids, "ask.so_far") for ids in _list(asked.get("so_far", []), "ask.so_far"))
            return Ask(number, _text(asked, "url"), _object(asked.get("body"), "ask.body"), so_far)
        case "stop":
            return Stop(number)
        case "begin":
            return Begin(number, _count(_object(value, "begin"), "prompt_tokens"))
        case "delta":
            return Deltas(number, tuple(_read_delta(_object(one, "delta")) for one in _list(value, "delta")))
        case "vectors":
            return Vectors(number, tuple(_vector(one) for one in _list(value, "vectors")))
        case "end":
            ended = _object(value, "end")
            usage = _object(ended.get("usage"), "end.usage")
            choices = tuple(
                _read_end(_object(one, "end.choices")) for one in _list(ended.get("choices"), "end.choices")
            )
            return End(number, choices, _count(usage, "prompt_tokens"), _count(usage, "completion_tokens"))
        case _:
            fault = _object(value, "fault")
            retry = fault.get("retry")
            if not isinstance(retry, bool):
                raise ProtocolError("fault.retry must be true or false")
            return Fault(number, _text(fault, "code"), _text(fault, "message"), _count(fault, "status"), retry)


def _read_delta(fields: JsonObject) -> ChoiceDelta:
    return ChoiceDelta(
        _count(fields, "i"),
        _ids(fields.get("ids", []), "delta.ids"),
        _text(fields, "text", ""),
        _text(fields, "reasoning", ""),
        tuple(_object(one, "delta.tool_calls") for one in _list(fields.get("tool_calls", []), "delta.tool_calls")),
        tuple(_object(one, "delta.logprobs") for one in _list(fields.get("logprobs", []), "delta.logprobs")),
    )


def _read_end(fields: JsonObject) -> ChoiceEnd:
    said = {key: None if fields.get(key) is None else _text(fields, key) for key in ("refusal", "note")}
    stop: Any = fields.get("stop_reason")
    if stop is not None:
        stop = _text(fields, "stop_reason") if isinstance(stop, str) else _count(fields, "stop_reason")
    ended = _text(fields, "finish_reason"), _count(fields, "tokens")
    return ChoiceEnd(_count(fields, "i"), *ended, **said, stop_reason=stop)


def _object(value: Any, what: str) -> JsonObject:
    if not isinstance(value, dict):
        raise ProtocolError(f"{what} must be an object")
    return cast(JsonObject, value)


def _list(value: Any, what: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise ProtocolError(f"{what} must be a list")
    return cast("list[Any]", value)


def _count(fields: JsonObject, key: str) -> int:
    value = fields.get(key)
    if type(value) is not int or value < 0:
        raise ProtocolError(f"{key} must be a number from 0")
    return value


def _text(fields: JsonObject, key: str, absent: str | None = None) -> str:
    value = fields.get(key, absent)
    if not isinstance(value, str):
        raise ProtocolError(f"{key} must be a string")
    return value


def _ids(value: Any, what: str) -> tuple[int, ...]:
    found = tuple(_list(value, what))
    if not all(type(one) is int and one >= 0 for one in found):
        raise ProtocolError(f"{what} must be token ids")
    return found


def _vector(value: Any) -> tuple[float, ...]:
    found = tuple(_list(value, "vectors"))
    if not all(isinstance(one, int | float) for one in found):
        raise ProtocolError("vectors must be numbers")
    return found
