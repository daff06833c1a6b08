"""Formats of an item's payload and result, which the client writes, the executor reads, and collecting reads back."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.model.errors import InputError
from rollout.workloads.json_form import JsonObject, canonical, field_in, invalid_result, object_in, parse_result


@dataclass(frozen=True, slots=True)
class Payload:
    """A row as written, with extra fields, and its place. An unusable row may be any JSON value.

    `images` has the image files of the row as data: URLs. `tag` is returned with the result: it tells several
    generations of one caller apart.
    """

    row: Any
    index: int
    file: str
    line: int
    tag: str = ""
    images: dict[str, str] = field(default_factory=dict[str, str])


_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def encode_payload(payload: Payload) -> bytes:
    # Not sorted: extra fields come back in the order they were written in.
    fields = {"row": payload.row, "index": payload.index, "file": payload.file, "line": payload.line}
    if payload.tag:
        fields["tag"] = payload.tag
    if payload.images:
        fields["images"] = payload.images
    return _encode(fields).encode("utf-8", "surrogatepass")


def decode_payload(data: bytes) -> Payload:
    """Decode a payload. Raises InputError if it is not one of this workload."""
    try:
        fields = json.loads(data.decode("utf-8", "surrogatepass"))
        place = fields["row"], fields["index"], fields["file"], fields["line"]
        return Payload(*place, fields.get("tag", ""), fields.get("images", {}))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"this is no payload of the infer workload: {error}") from error


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    text: str
    finish_reason: str
    tokens: int
    logprobs: list[JsonObject] | None = None
    tool_calls: list[JsonObject] | None = None
    reasoning: str | None = None
    refusal: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class RowResult:
    """The result of a row. A row that asked for embeddings has one vector per input and no choices."""

    choices: tuple[ChoiceResult, ...]
    prompt_tokens: int
    tag: str = ""  # of the payload
    embeddings: tuple[tuple[float, ...], ...] | None = None


def encode_result(result: RowResult) -> bytes:
    choices: list[JsonObject] = []
    for choice in result.choices:
        fields: JsonObject = {"text": choice.text, "finish_reason": choice.finish_reason, "tokens": choice.tokens}
        if choice.logprobs is not None:
            fields["logprobs"] = choice.logprobs
        if choice.tool_calls is not None:
            fields["tool_calls"] = choice.tool_calls
        if choice.reasoning is not None:
            fields["reasoning"] = choice.reasoning
        if choice.refusal is not None:
            fields["refusal"] = choice.refusal
        if choice.note is not None:
            fields["note"] = choice.note
        choices.append(fields)
    fields = {"choices": choices, "prompt_tokens": result.prompt_tokens}
    if result.tag:
        fields["tag"] = result.tag
    if result.embeddings is not None:
        fields["embeddings"] = [encode_vector(vector) for vector in result.embeddings]
    return canonical(fields)


def encode_vector(vector: Sequence[float]) -> str:
    """Encode a vector as base64 of little-endian float32, like OpenAI's `encoding_format = "base64"`."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _vector(text: Any) -> tuple[float, ...]:
    """Decode float32 to decimals of nine digits, which round-trip exactly. Raises InvalidResultError."""
    try:
        data = base64.b64decode(text, validate=True)
        values = struct.unpack(f"<{len(data) // 4}f", data)
    except (TypeError, ValueError, struct.error):
        raise invalid_result("an embedding is no base64 of float32") from None
    if not values or not all(math.isfinite(value) for value in values):
        raise invalid_result("an embedding is empty, or has a number that is not finite")
    return tuple(float(f"{value:.9g}") for value in values)


def decode_result(data: bytes) -> RowResult:
    """Decode a result. Raises InvalidResultError if it is not one of this workload."""
    fields = object_in(parse_result(data), "the result")
    choices = tuple(_choice(object_in(choice, "a choice")) for choice in field_in(fields, "choices", list))
    embeddings = None
    if "embeddings" in fields:
        embeddings = tuple(_vector(text) for text in field_in(fields, "embeddings", list))
    if not choices and not embeddings:
        raise invalid_result("choices is empty")
    tag: str = field_in(fields, "tag", str) if "tag" in fields else ""
    return RowResult(choices, field_in(fields, "prompt_tokens", int), tag, embeddings)


def _choice(fields: JsonObject) -> ChoiceResult:
    logprobs = None
    if fields.get("logprobs") is not None:
        logprobs = [_logprob(object_in(token, "a token of logprobs")) for token in field_in(fields, "logprobs", list)]
    calls = None
    if fields.get("tool_calls") is not None:
        calls = [_tool_call(object_in(call, "a tool call")) for call in field_in(fields, "tool_calls", list)]
    return ChoiceResult(
        field_in(fields, "text", str),
        field_in(fields, "finish_reason", str),
        field_in(fields, "tokens", int),
        logprobs,
        calls,
        field_in(fields, "reasoning", str, type(None)),
        field_in(fields, "refusal", str, type(None)),
        field_in(fields, "note", str, type(None)),
    )


def _tool_call(fields: JsonObject) -> JsonObject:
    field_in(fields, "id", str)
    function = object_in(fields.get("function"), "the function of a tool call")
    field_in(function, "name", str)
    field_in(function, "arguments", str)
    return fields


def _logprob(fields: JsonObject) -> JsonObject:
    for one in (fields, *(object_in(other, "an entry of top") for other in field_in(fields, "top", list))):
        field_in(one, "token", str)
        field_in(one, "logprob", float, int)
    return fields
