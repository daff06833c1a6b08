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
"""At most, of one frame: what the wire takes."""
CANNOT_CONTINUE = "cannot_continue"
"""Code of the fault of an engine that cannot go on behind `so_far`."""
GATHER_S = 0.01
"""Messages of this long go into one frame: a frame costs each process that it passes some 70 µs (ADR 0013), and a busy
engine has a message for each request every few milliseconds."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Answer a request: `url` and `body` as an OpenAI client sends them. `so_far`: the token ids that another replica
    drew of each choice, in order; the answer goes on behind them. Empty: from the beginning. What is sampled goes on as
    it would have only where `body` has a seed, and the engine can draw from its middle (transformers)."""

    id: int
    url: str
    body: JsonObject
    so_far: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Stop:
    """Nobody wants the answer any longer. None of its messages follows those that are under way."""

    id: int


@dataclass(frozen=True, slots=True)
class Begin:
    """The request has been read and goes to the engine. `prompt_tokens` is 0 where only the end tells."""

    id: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What is new of choice `i`. `ids` has every token as soon as it is drawn; text may come later, and what a
    replica drew after `so_far` comes without what was said before. `tool_calls` are whole calls, as OpenAI writes them
    in a message. `logprobs`: of each of `ids`, {"token", "logprob", "top": [{"token", "logprob"}]}."""

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
    """Embeddings of the next inputs, in order: they come in several messages where one would be too large."""

    id: int
    vectors: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """`finish_reason`: stop, length, tool_calls, or what a forwarded server says. `tokens`: those drawn in all, with
    those of `so_far`. `stop_reason`: the stop string, or the id of the token, that ended the text."""

    i: int
    finish_reason: str
    tokens: int
    refusal: str | None = None
    note: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class End:
    """The last message of a request that was answered. An answer of vectors has no choices."""

    id: int
    choices: tuple[ChoiceEnd, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """The last message of a request that was not answered. `status`: the HTTP status that fits; below 500 the fault is
    the request's own and counts against no engine. `retry`: another replica, or this one later, may answer it."""

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
    """One message as JSON, of which `frames_of` makes frames."""
    name, value = _body(message)
    # A model may write half of a surrogate pair; `json.loads` reads one back.
    return _json({"id": message.id, name: value}).encode("utf-8", "surrogatepass")


def frames_of(messages: Iterable[bytes]) -> Iterator[bytes]:
    """Encoded messages as few frames, in order. ProtocolError: one is larger than a frame."""
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
"""A gateway's first frame to a replica: until it sends one, the replica does not know of it. And what a replica sends
each BEAT_S to every gateway that it knows of."""
BEAT_S = 5.0


def to_replica(frame: bytes) -> list[ToReplica]:
    """The messages of a gateway's frame. ProtocolError: it is none."""
    return [cast(ToReplica, one) for one in _decoded(frame, _TO_REPLICA)]


def from_replica(frame: bytes) -> list[FromReplica]:
    """The messages of a replica's frame. ProtocolError: it is none."""
    return [cast(FromReplica, one) for one in _decoded(frame, _FROM_REPLICA)]


class Timers(Protocol):
    """As an event loop has them."""

    def time(self) -> float: ...

    def call_later(self, delay: float, callback: Callable[[], None], /) -> Any: ...


_AT_ONCE = Ask | Begin | End | Fault


@dataclass(slots=True)
class Coalescer:
    """Gathers messages into frames: at once if nothing was sent in the last GATHER_S, else when they have passed. What
    begins or ends a request waits for nobody, and takes with it what does.

    `send` gets each frame. It is called within `add`, or by `timers`.
    """

    send: Callable[[bytes], None]
    timers: Timers
    _waiting: list[bytes] = field(default_factory=list[bytes])
    _sent_at: float = float("-inf")
    _armed: bool = False

    def add(self, *messages: Message) -> None:
        """They go together, where a frame has room for all. ProtocolError: one is larger than a frame; nothing of them
        is sent."""
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
        """Send what waits, now."""
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
