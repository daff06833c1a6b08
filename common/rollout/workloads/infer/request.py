"""What a row asks for: its prompt or messages and its sampling. Used by the client before anything starts and by the
executor for every attempt, so both read a row alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, cast

from blake3 import blake3
from pydantic import ValidationError

from rollout.config.wording import describe
from rollout.model.errors import InputError
from rollout.workloads.infer.config import SamplingSection
from rollout.workloads.infer.honoured import FORWARDS
from rollout.workloads.json_form import JsonObject, canonical

SCHEMA_VERSION = 1
"""First byte hashed into an item id: grows when the meaning of a row or of a sampling key changes."""

_CONTENT = ("prompt", "messages", "body")

_OVERRIDES = frozenset(SamplingSection.model_fields) - {"stream"}
_BODY_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "min_tokens", "max_tokens", "seed", "stop", "n",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos",
)  # fmt: skip
_BODY_OTHER = frozenset(
    {
        "model", "stream", "prompt", "messages", "max_completion_tokens", "logprobs", "top_logprobs",
        "response_format",
    }
)  # fmt: skip
_OF_CHAT = frozenset({"reasoning_effort", "chat_template_kwargs"})
_OURS = frozenset(
    {
        "conversation", "messages", "tokenize", "add_generation_prompt", "chat_template", "tools", "documents",
        "return_tensors", "return_dict", "padding", "truncation", "max_length", "continue_final_message",
        "tokenizer_kwargs", "return_assistant_tokens_mask",
    }
)  # fmt: skip
_TEMPLATE = "chat_template_kwargs"
IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "stream_options", "safety_identifier", "prompt_cache_key"}
)
"""Keys of a request that change nothing about the text generated here."""
_ASKED = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
_URLS = tuple(_ASKED)


@dataclass(frozen=True, slots=True)
class RowRequest:
    """Exactly one of `prompt`, `messages` and `body` is set. `explicit_seed`: the row names its own seed. `body`: of an
    OpenAI row whose backend forwards it, without `model`."""

    sampling: SamplingSection
    prompt: str | None = None
    messages: tuple[JsonObject, ...] | None = None
    explicit_seed: bool = False
    openai: str = ""  # the url of an OpenAI batch line, else empty
    template: JsonObject = field(default_factory=JsonObject)  # further variables of the chat template
    body: JsonObject | None = None

    @property
    def content(self) -> JsonObject:
        """What the row asks, as its line of output shows it."""
        if self.body is not None:
            return {key: self.body[key] for key in ("messages", "prompt", "input") if key in self.body}
        return {"prompt": self.prompt} if self.messages is None else {"messages": list(self.messages)}


def sampling_json(sampling: SamplingSection) -> JsonObject:
    """The sampling keys by name. Not to be changed: rows without sampling of their own share one."""
    return _dumped(sampling)[0]


# The run's defaults, which nearly every row uses, and what they are as JSON: dumping them anew is half of a row's cost.
_last: list[tuple[SamplingSection, JsonObject, bytes]] = []


def _dumped(sampling: SamplingSection) -> tuple[JsonObject, bytes]:
    for known, fields, text in _last:
        if known is sampling:
            return fields, text
    fields = sampling.model_dump(mode="json", exclude={"stream"})
    text = canonical(fields)
    _last[:] = [(sampling, fields, text)]
    return fields, text


def parse_row(row: JsonObject, defaults: SamplingSection, kind: str) -> RowRequest:
    """The request in `row` to a backend of that kind. InputError says what is wrong and what to write instead, without
    the place."""
    if "body" in row:
        return _parse_openai(row, defaults, kind)
    prompt, messages = row.get("prompt"), row.get("messages")
    if prompt is None and messages is None:
        near = next(((key, close) for key in row for close in get_close_matches(key, _CONTENT, n=1)), None)
        hint = f'did you mean that by "{near[0]}"?' if near is not None else "add one of them"
        named = f'"{near[1]}"' if near is not None else '"prompt", "messages" or "body"'
        raise InputError(f"the row has no {named}: {hint}")
    if prompt is not None and messages is not None:
        raise InputError('the row has both "prompt" and "messages": keep one of them')
    if prompt is not None and not isinstance(prompt, str):
        raise InputError(f'"prompt" must be a string, not {kind_of(prompt)}')
    checked = None if messages is None else _messages(messages, "messages")
    override = row.get("sampling")
    if override is None:
        return RowRequest(defaults, prompt, checked)
    if not isinstance(override, dict):
        raise InputError(f'"sampling" must be an object with sampling keys, not {kind_of(override)}')
    override = cast(JsonObject, override)
    unknown = sorted(override.keys() - _OVERRIDES)
    if unknown:
        raise InputError(f'"sampling" has the unknown key "{unknown[0]}"; known: {", ".join(sorted(_OVERRIDES))}')
    if isinstance(override.get("json_schema"), str):
        raise InputError('"sampling.json_schema" of a row must be the schema itself, not a path')
    return RowRequest(_override(defaults, override), prompt, checked, override.get("seed") is not None)


def id_key(row: JsonObject) -> str:
    """The field by which `row` is known: "custom_id" of an OpenAI line, and of any other that has no "id"."""
    named = isinstance(row.get("custom_id"), str | int) and row.get("id") is None
    return "custom_id" if "body" in row or named else "id"


def _override(defaults: SamplingSection, override: JsonObject, what: str = "sampling") -> SamplingSection:
    if not override:
        return defaults
    try:
        return SamplingSection.model_validate({**defaults.model_dump(), **override}, strict=True)
    except ValidationError as error:
        said: list[str] = []
        for entry in error.errors(include_url=False):
            place = ".".join([what, *(str(part) for part in entry["loc"][:1])])
            text = f'"{place}" {describe(cast(Mapping[str, Any], entry), place)}'
            if text not in said:
                said.append(text)
        raise InputError("; ".join(said)) from None


def _messages(value: Any, what: str) -> tuple[JsonObject, ...]:
    if value == []:
        raise InputError(f'"{what}" is an empty list: it needs at least one message')
    if not isinstance(value, list):
        raise InputError(f'"{what}" must be a non-empty list of messages, not {kind_of(cast(object, value))}')
    return tuple(_message(message, f"{what}[{i}]") for i, message in enumerate(cast(list[Any], value)))


def _message(message: Any, what: str) -> JsonObject:
    if not isinstance(message, dict):
        raise InputError(f'"{what}" must be an object with "role" and "content", not {kind_of(message)}')
    fields = cast(JsonObject, message)
    if not isinstance(fields.get("role"), str):
        raise InputError(f'"{what}" needs a "role", such as "user"')
    content = fields.get("content")
    if isinstance(content, str):
        return fields
    if not isinstance(content, list):
        raise InputError(f'"{what}.content" must be a string or a list of text parts, not {kind_of(content)}')
    texts: list[str] = []
    for part in cast(list[Any], content):
        text = cast(JsonObject, part).get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise InputError(f'"{what}.content" has a part that is not text: only {{"type": "text"}} is supported')
        texts.append(text)
    return {**fields, "content": "".join(texts)}


def _parse_openai(row: JsonObject, defaults: SamplingSection, kind: str) -> RowRequest:
    body = row["body"]
    if not isinstance(body, dict):
        raise InputError(f'"body" must be an object, not {kind_of(body)}')
    body = cast(JsonObject, body)
    if not isinstance(row.get("custom_id"), str):
        raise InputError('an OpenAI batch line needs a "custom_id" that is a string')
    if row.get("method", "POST") != "POST":
        raise InputError('"method" must be "POST"')
    url = row.get("url", _URLS[0] if "messages" in body else _URLS[1])
    if url not in _URLS:
        raise InputError(f'"url" must be {_URLS[0]} or {_URLS[1]}, not {url!r}')
    if body.get("stream"):
        raise InputError('"body.stream" must be false: a batch does not stream')
    if kind in FORWARDS:
        return _forwarded(body, defaults, url)
    chat = url == _URLS[0]
    unknown = sorted(body.keys() - IGNORED - _BODY_OTHER - set(_BODY_SAMPLING) - (_OF_CHAT if chat else set()))
    if unknown:
        listed = ", ".join(f'"body.{key}"' for key in unknown)
        one = len(unknown) == 1
        raise InputError(f"{listed} {'is not supported: remove it' if one else 'are not supported: remove them'}")
    override: JsonObject = {key: body[key] for key in _BODY_SAMPLING if body.get(key) is not None}
    if body.get("max_completion_tokens") is not None:
        override["max_tokens"] = body["max_completion_tokens"]
    override.update(_body_logprobs(body, chat))
    override.update(_response_format(body.get("response_format")))
    sampling = _override(defaults, override, "body")
    explicit = override.get("seed") is not None
    if chat:
        if "messages" not in body:
            raise InputError(f'"body.messages" is missing: {url} needs it')
        messages = _messages(body["messages"], "body.messages")
        return RowRequest(sampling, None, messages, explicit, url, _template(body))
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(cast(list[Any], prompt)) == 1:
        prompt = cast(list[Any], prompt)[0]
    if not isinstance(prompt, str):
        raise InputError(f'"body.prompt" must be one string, not {kind_of(cast(object, prompt))}')
    return RowRequest(sampling, prompt, None, explicit, url)


def _forwarded(body: JsonObject, defaults: SamplingSection, url: str) -> RowRequest:
    asked = _ASKED[url]
    if body.get(asked) is None:
        raise InputError(f'"body.{asked}" is missing: {url} needs it')
    sent = {key: value for key, value in body.items() if key not in ("model", "stream", "stream_options")}
    return RowRequest(defaults, openai=url, body=sent)


def _template(body: JsonObject) -> JsonObject:
    """Variables of the chat template, as vLLM's server takes them."""
    given = body.get(_TEMPLATE)
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise InputError(f'"body.{_TEMPLATE}" must be an object, not {kind_of(given)}')
    template = cast(JsonObject, given)
    if taken := sorted(template.keys() & _OURS):
        raise InputError(f'"body.{_TEMPLATE}.{taken[0]}" is set by the engine: remove it')
    effort = body.get("reasoning_effort")
    if effort is None:
        return template
    if not isinstance(effort, str):
        raise InputError(f'"body.reasoning_effort" must be a string such as "low", not {kind_of(effort)}')
    return {"reasoning_effort": effort, **template}


def _body_logprobs(body: JsonObject, chat: bool) -> JsonObject:
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


def _response_format(value: Any) -> JsonObject:
    if value is None:
        return {}
    if isinstance(value, dict):
        fields = cast(JsonObject, value)
        kind = fields.get("type")
        if kind == "text":
            return {}
        if kind == "json_object":
            return {"json_schema": {"type": "object"}}
        holder = fields.get("json_schema")
        schema = cast(JsonObject, holder).get("schema") if isinstance(holder, dict) else None
        if kind == "json_schema" and isinstance(schema, dict):
            return {"json_schema": schema}
    raise InputError('"body.response_format" must be {"type": "text" | "json_object"} or a json_schema with a "schema"')


def kind_of(value: object) -> str:
    """The type of a JSON value, in words."""
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


def item_id(model_content_id: str, request: RowRequest, index: int) -> bytes:
    """32 bytes that change with everything that changes the result, and with the row's place."""
    hasher = blake3(bytes([SCHEMA_VERSION]))
    asked = request.content if request.body is None else {"url": request.openai, "body": request.body}
    parts = [bytes.fromhex(model_content_id), canonical(asked), _dumped(request.sampling)[1]]
    if request.template:
        parts.append(canonical(request.template))
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    hasher.update(index.to_bytes(8, "little"))
    return hasher.digest()


def row_seed(request: RowRequest, identity: bytes) -> int:
    """The row's own seed if it names one, else 63 bits of its item id. Choice k of a row uses seed + k."""
    if request.explicit_seed and request.sampling.seed is not None:
        return request.sampling.seed
    return int.from_bytes(blake3(b"seed" + identity).digest()[:8], "little") >> 1
