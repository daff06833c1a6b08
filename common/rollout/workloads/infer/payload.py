"""Formats of an item's payload and of its result: what the client writes, the executor reads and collect reads back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rollout.model.errors import InputError
from rollout.workloads.json_form import JsonObject, canonical, field_in, invalid_result, object_in, parse_result


@dataclass(frozen=True, slots=True)
class Payload:
    """A row as written, with extra fields, and where it came from. Of a row that cannot be used any JSON value.

    `tag` comes back with the result: whoever asks for several generations at one place knows which one it is.
    """

    row: Any
    index: int
    file: str
    line: int
    tag: str = ""


_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def encode_payload(payload: Payload) -> bytes:
    # Not sorted: extra fields come back in the order they were written in.
    fields = {"row": payload.row, "index": payload.index, "file": payload.file, "line": payload.line}
    if payload.tag:
        fields["tag"] = payload.tag
    return _encode(fields).encode("utf-8", "surrogatepass")


def decode_payload(data: bytes) -> Payload:
    """InputError if it is no payload of this workload."""
    try:
        fields = json.loads(data.decode("utf-8", "surrogatepass"))
        return Payload(fields["row"], fields["index"], fields["file"], fields["line"], fields.get("tag", ""))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"this is no payload of the infer workload: {error}") from error


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    text: str
    finish_reason: str
    tokens: int
    logprobs: list[JsonObject] | None = None


@dataclass(frozen=True, slots=True)
class RowResult:
    choices: tuple[ChoiceResult, ...]
    prompt_tokens: int
    tag: str = ""  # of the payload


def encode_result(result: RowResult) -> bytes:
    choices: list[JsonObject] = []
    for choice in result.choices:
        fields: JsonObject = {"text": choice.text, "finish_reason": choice.finish_reason, "tokens": choice.tokens}
        if choice.logprobs is not None:
            fields["logprobs"] = choice.logprobs
        choices.append(fields)
    tag = {"tag": result.tag} if result.tag else {}
    return canonical({"choices": choices, "prompt_tokens": result.prompt_tokens, **tag})


def decode_result(data: bytes) -> RowResult:
    """InvalidResultError if it is no result of this workload."""
    fields = object_in(parse_result(data), "the result")
    choices = tuple(_choice(object_in(choice, "a choice")) for choice in field_in(fields, "choices", list))
    if not choices:
        raise invalid_result("choices is empty")
    tag: str = field_in(fields, "tag", str) if "tag" in fields else ""
    return RowResult(choices, field_in(fields, "prompt_tokens", int), tag)


def _choice(fields: JsonObject) -> ChoiceResult:
    logprobs = None
    if fields.get("logprobs") is not None:
        logprobs = [_logprob(object_in(token, "a token of logprobs")) for token in field_in(fields, "logprobs", list)]
    return ChoiceResult(
        field_in(fields, "text", str), field_in(fields, "finish_reason", str), field_in(fields, "tokens", int), logprobs
    )


def _logprob(fields: JsonObject) -> JsonObject:
    for one in (fields, *(object_in(other, "an entry of top") for other in field_in(fields, "top", list))):
        field_in(one, "token", str)
        field_in(one, "logprob", float, int)
    return fields
