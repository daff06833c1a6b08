"""Translates keys of an OpenAI or vLLM request body into sampling keys and variables of the chat template."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, cast

from rollout.model.errors import InputError
from rollout.workloads.infer.honoured import EMBEDS, FORWARDS, POOLS, TOOLS, not_honoured
from rollout.workloads.infer.prompts import Prompt, as_written, kind_of, prompts_of
from rollout.workloads.json_form import JsonObject, short

CHAT, TEXT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
ASKS = {CHAT: "messages", TEXT: "prompt", EMBED: "input"}
"""The key with the prompt, by URL."""

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
_OF_TOOLS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
_OF_CHAT = frozenset({"reasoning_effort", "verbosity", _TEMPLATE, *_OF_TOOLS})
_OF_EMBED = frozenset({"input", "dimensions", "encoding_format", "pooling"})
_POOLING = ("mean", "last", "cls")
_DIMENSIONS_MAX = 1 << 16
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "echo": (False,), "suffix": ("",), "best_of": (1,), "use_beam_search": (False,), "modalities": (["text"],),
    "tool_choice": ("none",), "parallel_tool_calls": (True, False), "normalize": (True,), "stream": (False,),
}  # fmt: skip
"""Values of otherwise refused keys that have no effect and are accepted."""
IGNORED = frozenset(
    {
        "user", "metadata", "store", "service_tier", "stream_options", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "priority", "request_id", "cache_salt",
    }
)  # fmt: skip
"""Keys of a request that do not affect the generated text."""
_OURS = frozenset(
    {
        "conversation", "messages", "tokenize", "add_generation_prompt", "chat_template", "tools", "documents",
        "return_tensors", "return_dict", "padding", "truncation", "max_length", "continue_final_message",
        "tokenizer_kwargs", "return_assistant_tokens_mask",
    }
)  # fmt: skip


def refuse_keys(body: JsonObject, url: str, kind: str) -> None:
    """Raise InputError, naming each key that a backend of this kind does not honour."""
    if url == EMBED:
        if kind not in EMBEDS:
            raise InputError(f'"url" {url} is not supported by backend "{kind}": it makes no embeddings')
        known = {"model", *IGNORED, *_OF_EMBED}
    else:
        known = {*_SAMPLING, *_GUIDED, *_OTHER, *IGNORED, "messages", "prompt", *(_OF_CHAT if url == CHAT else ())}
    if kind not in POOLS:
        known.discard("pooling")
    if kind not in TOOLS:
        known -= _OF_TOOLS
    unknown = [key for key, value in body.items() if key not in known and not _asks_nothing(key, value)]
    given = {key: _GUIDED.get(key, key) for key, value in body.items() if value is not None}
    structured = body.get("structured_outputs")
    if isinstance(structured, dict):
        given |= {f"structured_outputs.{key}": key for key in cast(JsonObject, structured)}
    refused = not_honoured(kind, given.values()) if url != EMBED else []
    unknown += [key for key, name in given.items() if name in refused]
    if unknown:
        listed = ", ".join(f'"body.{key}"' for key in sorted(unknown))
        one = len(unknown) == 1
        verb, remove = ("is", "remove it") if one else ("are", "remove them")
        raise InputError(f'{listed} {verb} not supported by backend "{kind}" at {url}: {remove}')


def _asks_nothing(key: str, value: Any) -> bool:
    return value is None or value in _NEUTRAL.get(key, ())


def sampling_of(body: JsonObject, url: str) -> JsonObject:
    """Return the sampling keys that `body` sets; values are not checked. Raises InputError for keys without an
    equivalent."""
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


@dataclass(frozen=True, slots=True)
class Embedding:
    """Texts or token ids to embed. `dimensions` is the length of each vector, or None for all. An empty `pooling` means
    the model's own."""

    inputs: tuple[Prompt, ...]
    dimensions: int | None = None
    pooling: str = ""
    base64: bool = False

    def as_json(self) -> JsonObject:
        """Return everything that affects the output line."""
        return {
            "input": as_written(self.inputs),
            "dimensions": self.dimensions,
            "pooling": self.pooling,
            "base64": self.base64,
        }


def embedding_of(body: JsonObject, where: str) -> Embedding:
    """Return what a body of /v1/embeddings asks for. Raises InputError."""
    dimensions, pooling = body.get("dimensions"), body.get("pooling")
    if dimensions is not None and (type(dimensions) is not int or not 1 <= dimensions <= _DIMENSIONS_MAX):
        raise InputError(f'"{where}.dimensions" must be a number from 1 to {_DIMENSIONS_MAX}, not {short(dimensions)}')
    if pooling is not None and pooling not in _POOLING:
        raise InputError(f'"{where}.pooling" must be one of {", ".join(_POOLING)}, not {short(pooling)}')
    form = body.get("encoding_format")
    if form not in (None, "float", "base64"):
        raise InputError(f'"{where}.encoding_format" must be "float" or "base64", not {short(form)}')
    inputs = prompts_of(body.get("input"), f"{where}.input")
    if "" in inputs:
        raise InputError(f'"{where}.input" has an empty text, of which there is no embedding')
    return Embedding(inputs, dimensions, pooling or "", form == "base64")


def plain_embedding(value: Any, kind: str) -> Embedding:
    """Parse the `embed` of a plain row: the inputs to embed, or an object with the keys of a body. Raises
    InputError."""
    if kind not in EMBEDS and kind not in FORWARDS:
        raise InputError(f'"embed" is not supported by backend "{kind}": it makes no embeddings')
    fields = cast(JsonObject, value) if isinstance(value, dict) else {"input": value}
    if unknown := sorted(fields.keys() - _OF_EMBED):
        raise InputError(f'"embed" has the unknown key "{unknown[0]}"; known: {", ".join(sorted(_OF_EMBED))}')
    if fields.get("pooling") is not None and kind not in POOLS:
        raise InputError(f'"embed.pooling" is not supported by backend "{kind}": remove it')
    return embedding_of(fields, "embed")


def template_of(body: JsonObject) -> JsonObject:
    """Return variables of the chat template, with the names of vLLM's server. Raises InputError."""
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
"""Its place in the body, its sampling key, and its value."""


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
