"""Prompts and messages of a row, in the forms of OpenAI's interface."""

from __future__ import annotations

from typing import Any, cast

from rollout.model.errors import InputError
from rollout.workloads.infer.honoured import IMAGES
from rollout.workloads.infer.images import PART, url_fault
from rollout.workloads.json_form import JsonObject

Prompt = str | tuple[int, ...]
"""A text, or token ids."""

PROMPTS_MAX = 2048
"""Maximum number of prompts in a row: OpenAI's limit for embeddings."""
_TOKEN_MAX = 1 << 31


def prompts_of(value: Any, what: str) -> tuple[Prompt, ...]:
    """Parse a string, token ids, or a list of either. Raises InputError."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise InputError(f'"{what}" must be a string, or a list of strings or token ids, not {kind_of(value)}')
    given = cast(list[Any], value)
    if not given:
        raise InputError(f'"{what}" is an empty list')
    if _is_token(given[0]):
        return (_ids(given, what),)
    if len(given) > PROMPTS_MAX:
        raise InputError(f'"{what}" has {len(given)} entries: {PROMPTS_MAX} at most, make several rows of them')
    texts = isinstance(given[0], str)
    for at, one in enumerate(given):
        if not isinstance(one, str if texts else list) or one == []:
            wrong = "an empty list" if one == [] else kind_of(cast(object, one))
            raise InputError(f'"{what}[{at}]" is {wrong}: entries must be all strings, or all lists of token ids')
    if texts:
        return tuple(given)
    return tuple(_ids(cast(list[Any], one), f"{what}[{at}]") for at, one in enumerate(given))


def as_written(prompts: tuple[Prompt, ...]) -> Any:
    """Return the prompts as JSON; a single one is not in a list."""
    given = [one if isinstance(one, str) else list(one) for one in prompts]
    return given[0] if len(given) == 1 else given


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _ids(value: list[Any], what: str) -> tuple[int, ...]:
    for at, one in enumerate(value):
        if not _is_token(one) or not 0 <= one < _TOKEN_MAX:
            shown = one if _is_token(one) else kind_of(one)
            raise InputError(f'"{what}[{at}]" must be a token id from 0, not {shown}')
    return tuple(value)


def messages_of(value: Any, what: str, kind: str) -> tuple[JsonObject, ...]:
    """Parse messages for a backend of this kind. Content is text, or parts if it includes images. Raises InputError."""
    if value == []:
        raise InputError(f'"{what}" is an empty list: it needs at least one message')
    if not isinstance(value, list):
        raise InputError(f'"{what}" must be a non-empty list of messages, not {kind_of(cast(object, value))}')
    return tuple(_message(message, f"{what}[{i}]", kind) for i, message in enumerate(cast(list[Any], value)))


def _message(message: Any, what: str, kind: str) -> JsonObject:
    if not isinstance(message, dict):
        raise InputError(f'"{what}" must be an object with "role" and "content", not {kind_of(message)}')
    fields = cast(JsonObject, message)
    if not isinstance(fields.get("role"), str):
        raise InputError(f'"{what}" needs a "role", such as "user"')
    content = fields.get("content")
    if fields.get("tool_calls") is not None:
        _check_calls(fields["tool_calls"], what)
        if content is None:
            return {**fields, "content": ""}
    if isinstance(content, str):
        return fields
    if not isinstance(content, list):
        raise InputError(f'"{what}.content" must be a string or a list of parts, not {kind_of(content)}')
    parts = [_part(part, f"{what}.content[{at}]", kind) for at, part in enumerate(cast(list[Any], content))]
    if any(part["type"] == PART for part in parts):
        return {**fields, "content": parts}
    return {**fields, "content": "\n".join(part["text"] for part in parts)}  # as vLLM's server joins them


def _part(part: Any, what: str, kind: str) -> JsonObject:
    fields = cast(JsonObject, part) if isinstance(part, dict) else {}
    if fields.get("type") == PART:
        if kind not in IMAGES:
            raise InputError(f'"{what}" is an image, which backend "{kind}" does not take')
        given = fields.get(PART)
        image = cast(JsonObject, given) if isinstance(given, dict) else {"url": given}
        if fault := url_fault(image.get("url")):
            raise InputError(f'"{what}.{PART}" {fault}')
        return {"type": PART, PART: image}
    if not isinstance(fields.get("text"), str):
        raise InputError(f'"{what}" is neither text nor an image: use {{"type": "text"}} or {{"type": "{PART}"}}')
    return {"type": "text", "text": fields["text"]}


def _check_calls(value: Any, what: str) -> None:
    for call in cast(list[Any], value) if isinstance(value, list) else [None]:
        function = cast(JsonObject, call).get("function") if isinstance(call, dict) else None
        name = cast(JsonObject, function).get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise InputError(
                f'"{what}.tool_calls" must be a list of calls: {{"id", "type", "function": {{"name"...}}}}'
            )


def kind_of(value: object) -> str:
    """Return the type of a JSON value in words."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
        case _:
            return "an object"
