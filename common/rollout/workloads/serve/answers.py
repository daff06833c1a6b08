"""Answers in OpenAI's formats, field by field as vLLM's server writes them (vllm.entrypoints.openai 0.32): a client of
one reads the other.

`reasoning` is vLLM's name of what a model thinks aloud. `system_fingerprint` is left out, as with `--fingerprint-mode
none`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

from rollout.workloads.infer.payload import encode_vector
from rollout.workloads.json_form import JsonObject
from rollout.workloads.serve.asks import Asked
from rollout.workloads.serve.exchange import Piece
from rollout.workloads.serve.frames import ChoiceDelta, ChoiceEnd, End

DONE = b"data: [DONE]\n\n"
_LOGPROB_MIN = -9999.0
"""Replaces minus infinity, which JSON cannot express."""


def encoded(value: JsonObject) -> bytes:
    """Encode a whole answer."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # a model may write half of a surrogate pair
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def event(value: JsonObject) -> bytes:
    """Encode one event of a stream."""
    try:
        data = to_json(value)  # vLLM's serializer: numbers are written alike
    except PydanticSerializationError:
        data = json.dumps(value, separators=(",", ":")).encode()
    return b"data: " + data + b"\n\n"


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that every part of an answer repeats. `created` is in Unix seconds."""

    id: str
    created: int
    model: str


def _usage(prompt: int, completion: int) -> JsonObject:
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


_NO_DETAILS = {"prompt_tokens_details": None, "completion_tokens_details": None}


def _one_logprob(entry: JsonObject) -> JsonObject:
    token: str = entry["token"]
    logprob = max(entry["logprob"], _LOGPROB_MIN)
    return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", "replace"))}


def _chat_logprobs(entries: list[JsonObject] | tuple[JsonObject, ...]) -> JsonObject:
    return {
        "content": [
            {**_one_logprob(entry), "top_logprobs": [_one_logprob(other) for other in entry["top"]]}
            for entry in entries
        ]
    }


def _text_logprobs(entries: list[JsonObject] | tuple[JsonObject, ...], offset: int) -> JsonObject:
    offsets: list[int] = []
    tops: list[JsonObject] = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry["token"])
        # The token that was drawn is one of them, whatever its rank.
        tops.append({one["token"]: max(one["logprob"], _LOGPROB_MIN) for one in (entry, *entry["top"])})
    return {
        "text_offset": offsets,
        "token_logprobs": [max(entry["logprob"], _LOGPROB_MIN) for entry in entries],
        "tokens": [entry["token"] for entry in entries],
        "top_logprobs": tops,
    }


# ---- whole answers


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    tool_calls: list[JsonObject] = field(default_factory=list[JsonObject])
    logprobs: list[JsonObject] = field(default_factory=list[JsonObject])


@dataclass(slots=True)
class Whole:
    """An answer that is collected before it is sent."""

    asked: Asked
    choices: dict[int, _Choice] = field(default_factory=dict[int, _Choice])
    vectors: list[tuple[float, ...]] = field(default_factory=list[tuple[float, ...]])
    prompt_tokens: int = 0
    end: End = field(default_factory=lambda: End(0))
    _drawn: int = 0

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens of the prompt, and tokens of the answer so far."""
        return self.prompt_tokens, self.end.completion_tokens or self._drawn

    def add(self, piece: Piece) -> None:
        if piece.again:
            self.choices, self.vectors = {}, []
        for delta in piece.deltas:
            choice = self.choices.setdefault(delta.i, _Choice())
            self._drawn += len(delta.ids)
            choice.text.append(delta.text)
            choice.reasoning.append(delta.reasoning)
            choice.tool_calls.extend(delta.tool_calls)
            choice.logprobs.extend(delta.logprobs)
        self.vectors.extend(piece.vectors)
        if piece.end is not None:
            self.end = piece.end
        self.prompt_tokens = self.end.prompt_tokens or piece.prompt_tokens or self.prompt_tokens

    def body(self, head: Head) -> JsonObject:
        if self.asked.request.embeds:
            return self._embeddings(head)
        usage = _usage(self.prompt_tokens, self.end.completion_tokens) | _NO_DETAILS
        choices = [self._choice(end) for end in sorted(self.end.choices, key=lambda one: one.i)]
        answer: JsonObject = {
            "id": head.id,
            "object": "chat.completion" if self.asked.chats else "text_completion",
            "created": head.created,
            "model": head.model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": None,
            "usage": usage,
        }
        of_chat = ("prompt_logprobs", "prompt_token_ids", "prompt_text") if self.asked.chats else ()
        return answer | dict.fromkeys((*of_chat, "kv_transfer_params", "ec_transfer_params", "metrics"))

    def _choice(self, end: ChoiceEnd) -> JsonObject:
        found = self.choices.get(end.i, _Choice())
        text, reasoning, calls = "".join(found.text), "".join(found.reasoning), found.tool_calls
        if not self.asked.chats:
            return {
                "index": end.i,
                "text": text,
                "logprobs": _text_logprobs(found.logprobs, 0) if found.logprobs else None,
                "finish_reason": end.finish_reason,
                "stop_reason": end.stop_reason,
                **dict.fromkeys(("token_ids", "prompt_logprobs", "prompt_token_ids", "routed_experts")),
            }
        message: JsonObject = {
            "role": "assistant",
            "content": text or (None if (calls and not self.asked.must_call) or reasoning else ""),
            "refusal": end.refusal,
            **dict.fromkeys(("annotations", "audio", "function_call")),
            **({"tool_calls": calls} if calls else {}),
            "reasoning": reasoning or None,
        }
        return {
            "index": end.i,
            "message": message,
            "logprobs": _chat_logprobs(found.logprobs) if found.logprobs else None,
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop_reason,
            **dict.fromkeys(("token_ids", "routed_experts")),
        }

    def _embeddings(self, head: Head) -> JsonObject:
        shown: list[Any] = [encode_vector(v) if self.asked.request.base64 else list(v) for v in self.vectors]
        data = [{"index": at, "object": "embedding", "embedding": vector} for at, vector in enumerate(shown)]
        usage = _usage(self.prompt_tokens, 0) | _NO_DETAILS
        top = {"id": head.id, "object": "list", "created": head.created, "model": head.model}
        return {**top, "data": data, "usage": usage}


# ---- streams


@dataclass(slots=True)
class Stream:
    """An answer that is sent while it is generated: `add` returns the events of a piece."""

    asked: Asked
    head: Head
    prompt_tokens: int = 0
    completion_tokens: int = 0
    _begun: bool = False
    _tokens: dict[int, int] = field(default_factory=dict[int, int])
    _calls: dict[int, int] = field(default_factory=dict[int, int])
    _offsets: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens of the prompt, and tokens of the answer so far."""
        return self.prompt_tokens, self.completion_tokens or sum(self._tokens.values())

    def add(self, piece: Piece) -> Iterator[bytes]:
        self.prompt_tokens = piece.prompt_tokens or self.prompt_tokens
        if not self._begun:
            self._begun = True
            yield from self._roles()
        last = {delta.i: at for at, delta in enumerate(piece.deltas)}
        ends = {end.i: end for end in piece.end.choices} if piece.end is not None else {}
        for at, delta in enumerate(piece.deltas):
            self._tokens[delta.i] = self._tokens.get(delta.i, 0) + len(delta.ids)
            end = ends.pop(delta.i, None) if last[delta.i] == at else None
            yield from self._chunks(delta, end)
        for end in ends.values():
            yield from self._chunks(ChoiceDelta(end.i), end)
        if piece.end is not None:
            self.prompt_tokens = piece.end.prompt_tokens or self.prompt_tokens
            self.completion_tokens = piece.end.completion_tokens
            if self.asked.include_usage:
                yield event(self._top([]) | {"usage": _usage(self.prompt_tokens, self.completion_tokens)})
            yield DONE

    def _top(self, choices: list[JsonObject]) -> JsonObject:
        kind = "chat.completion.chunk" if self.asked.chats else "text_completion"
        head = self.head
        return {"id": head.id, "object": kind, "created": head.created, "model": head.model, "choices": choices}

    def _roles(self) -> Iterator[bytes]:
        for index in range(self.asked.choices if self.asked.chats else 0):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            chunk = self._top([choice]) | self._so_far(index)
            yield event(chunk | {"prompt_token_ids": None, "prompt_text": None})

    def _so_far(self, index: int) -> JsonObject:
        if not self.asked.continuous_usage:
            return {}
        usage = _usage(self.prompt_tokens, self._tokens.get(index, 0))
        return {"usage": usage | {"completion_tokens_details": None} if self.asked.chats else usage}

    def _chunks(self, delta: ChoiceDelta, end: ChoiceEnd | None) -> Iterator[bytes]:
        choice = self._chat(delta, end) if self.asked.chats else self._text(delta, end)
        if choice is not None:
            yield event(self._top([choice]) | self._so_far(delta.i))

    def _chat(self, delta: ChoiceDelta, end: ChoiceEnd | None) -> JsonObject | None:
        """Return a chunk, or None if there is nothing to send yet."""
        said: JsonObject = {}
        if delta.text or not (delta.reasoning or delta.tool_calls or self.asked.has_tools):
            said["content"] = delta.text
        if delta.reasoning:
            said["reasoning"] = delta.reasoning
        if delta.tool_calls:
            said["tool_calls"] = [self._call(delta.i, call) for call in delta.tool_calls]
        if end is not None and end.refusal is not None:
            said["refusal"] = end.refusal
        if not said and end is None and not delta.logprobs:
            return None
        logprobs = _chat_logprobs(delta.logprobs) if delta.logprobs else None
        choice: JsonObject = {"index": delta.i, "delta": said, "logprobs": logprobs, "finish_reason": None}
        if end is not None:
            choice |= {"finish_reason": end.finish_reason, "stop_reason": end.stop_reason}
        return choice | {"token_ids": None}

    def _call(self, index: int, call: JsonObject) -> JsonObject:
        number = self._calls.get(index, 0)
        self._calls[index] = number + 1
        return {"id": call.get("id"), "type": "function", "index": number, "function": call.get("function")}

    def _text(self, delta: ChoiceDelta, end: ChoiceEnd | None) -> JsonObject:
        logprobs = None
        if delta.logprobs:
            offset = self._offsets.get(delta.i, 0)
            logprobs = _text_logprobs(delta.logprobs, offset)
            self._offsets[delta.i] = offset + sum(len(entry["token"]) for entry in delta.logprobs)
        return {
            "index": delta.i,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": end.finish_reason if end is not None else None,
            "stop_reason": end.stop_reason if end is not None else None,
            **dict.fromkeys(("prompt_token_ids", "token_ids")),
        }
