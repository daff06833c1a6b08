"""Keys of an OpenAI request body, and of vLLM's server, as sampling keys and variables of the chat template."""

from __future__ import annotations

import json
from typing import Any, cast

from rollout.model.errors import InputError
from rollout.workloads.infer.honoured import not_honoured
from rollout.workloads.infer.prompts import kind_of
from rollout.workloads.json_form import JsonObject

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKS = {CHAT: "messages", TEXT: "prompt"}
"""The key that holds what is asked, by url."""

_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "min_tokens", "max_tokens", "seed", "stop", "n",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos",
    "logit_bias", "stop_token_ids", "allowed_token_ids", "bad_words", "include_stop_str_in_output",
    "skip_special_tokens",
)  # fmt: skip
_GUIDED = {
    "guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
}  # fmt: skip
_STRUCTURES = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
_OTHER = frozenset(
    {
        "model", "stream", "max_completion_tokens", "logprobs", "top_logprobs", "response_format",
        "structured_outputs",
    }
)  # fmt: skip
_TEMPLATE = "chat_template_kwargs"
_OF_CHAT = frozenset({"reasoning_effort", "verbosity", _TEMPLATE})
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "echo": (False,), "suffix": ("",), "best_of": (1,), "use_beam_search": (False,), "modalities": (["text"],),
    "tool_choice": ("none",), "parallel_tool_calls": (True, False),
}  # fmt: skip
"""Values that ask for nothing, of keys that are refused otherwise."""
IGNORED = frozenset(
    {
        "user", "metadata", "store", "service_tier", "stream_options", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "priority", "request_id", "cache_salt",
    }
)  # fmt: skip
"""Keys of a request that change nothing about the text generated here."""
_OURS = frozenset(
    {
        "conversation", "messages", "tokenize", "add_generation_prompt", "chat_template", "tools", "documents",
        "return_tensors", "return_dict", "padding", "truncation", "max_length", "continue_final_message",
        "tokenizer_kwargs", "return_assistant_tokens_mask",
    }
)  # fmt: skip


def refuse_keys(body: JsonObject, url: str, kind: str) -> None:
    """InputError names each key that a backend of that kind does not honour."""
    known = {*_SAMPLING, *_GUIDED, *_OTHER, *IGNORED, *ASKS.values(), *(_OF_CHAT if url == CHAT else ())}
    unknown = [key for key, value in body.items() if key not in known and not _asks_nothing(key, value)]
    given = {key: _GUIDED.get(key, key) for key, value in body.items() if value is not None}
    structured = body.get("structured_outputs")
    if isinstance(structured, dict):
        given |= {f"structured_outputs.{key}": key for key in cast(JsonObject, structured)}
    refused = not_honoured(kind, given.values())
    unknown += [key for key, name in given.items() if name in refused]
    if unknown:
        listed = ", ".join(f'"body.{key}"' for key in sorted(unknown))
        one = len(unknown) == 1
        verb, remove = ("is", "remove it") if one else ("are", "remove them")
        raise InputError(f'{listed} {verb} not supported by backend "{kind}" at {url}: {remove}')


def _asks_nothing(key: str, value: Any) -> bool:
    return value is None or value in _NEUTRAL.get(key, ())


def sampling_of(body: JsonObject, url: str) -> JsonObject:
    """The sampling keys that `body` sets. InputError for what has no such meaning; values are not looked at."""
    found: JsonObject = {key: body[key] for key in _SAMPLING if body.get(key) is not None}
    if body.get("max_completion_tokens") is not None:
        found["max_tokens"] = body["max_completion_tokens"]
    found.update(_logprobs(body, url == CHAT))
    structures = [*_guided(body), *_structured(body.get("structured_outputs"))]
    structures += _response_format(body.get("response_format"))
    if len(structures) > 1:
        places = " and ".join(f'"body.{place}"' for place, _, _ in structures[:2])
        raise InputError(f"{places} both say what form the answer has: keep one")
    found.update({key: value for _, key, value in structures})
    return found


def template_of(body: JsonObject) -> JsonObject:
    """Variables of the chat template, as vLLM's server takes them. InputError."""
    given = body.get(_TEMPLATE)
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise InputError(f'"body.{_TEMPLATE}" must be an object, not {kind_of(given)}')
    template = cast(JsonObject, given)
    if taken := sorted(template.keys() & _OURS):
        raise InputError(f'"body.{_TEMPLATE}.{taken[0]}" is set by the engine: remove it')
    named: JsonObject = {}
    for key in ("reasoning_effort", "verbosity"):
        value = body.get(key)
        if value is not None and not isinstance(value, str):
            raise InputError(f'"body.{key}" must be a string such as "low", not {kind_of(value)}')
        if value is not None:
            named[key] = value
    return {**named, **template}


def _logprobs(body: JsonObject, chat: bool) -> JsonObject:
    value = body.get("logprobs")
    if not chat:
        return {} if value is None else {"logprobs": value}
    top = body.get("top_logprobs")
    if value is None or value is False:
        if top:
            raise InputError('"body.top_logprobs" needs "logprobs": true')
        return {}
    if value is not True:
        raise InputError(f'"body.logprobs" must be true or false, not {kind_of(value)}')
    return {"logprobs": 0 if top is None else top}


Structure = tuple[str, str, Any]
"""Where it stands in the body, its sampling key, its value."""


def _guided(body: JsonObject) -> list[Structure]:
    given = [(key, name, body[key]) for key, name in _GUIDED.items() if body.get(key) is not None]
    return [(place, name, _schema(value, place) if name == "json_schema" else value) for place, name, value in given]


def _structured(value: Any) -> list[Structure]:
    if value is None:
        return []
    if not isinstance(value, dict):
        raise InputError(f'"body.structured_outputs" must be an object, not {kind_of(value)}')
    fields = {key: one for key, one in cast(JsonObject, value).items() if one is not None and one is not False}
    found: list[Structure] = []
    for key, one in fields.items():
        place = f"structured_outputs.{key}"
        if key == "json_object":
            found.append((place, "json_schema", {"type": "object"}))
        elif key not in _STRUCTURES:
            raise InputError(f'"body.{place}" is not supported: use one of {", ".join(_STRUCTURES)}')
        else:
            found.append((place, _STRUCTURES[key], _schema(one, place) if key == "json" else one))
    return found


def _schema(value: Any, place: str) -> JsonObject:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise InputError(f'"body.{place}" is no JSON: {error}') from error
    if not isinstance(value, dict):
        raise InputError(f'"body.{place}" must be a JSON schema, not {kind_of(value)}')
    return cast(JsonObject, value)


def _response_format(value: Any) -> list[Structure]:
    if value is None:
        return []
    if isinstance(value, dict):
        fields = cast(JsonObject, value)
        kind = fields.get("type")
        if kind == "text":
            return []
        if kind == "json_object":
            return [("response_format", "json_schema", {"type": "object"})]
        holder = fields.get("json_schema")
        schema = cast(JsonObject, holder).get("schema") if isinstance(holder, dict) else None
        if kind == "json_schema" and isinstance(schema, dict):
            return [("response_format", "json_schema", schema)]
    raise InputError('"body.response_format" must be {"type": "text" | "json_object"} or a json_schema with a "schema"')
