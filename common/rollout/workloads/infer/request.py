"""The request of a row: prompt or messages, and sampling. The client parses it before anything starts and the executor
for every attempt, so both read a row alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, cast

from blake3 import blake3
from pydantic import ValidationError

from rollout.config.wording import describe
from rollout.model.errors import InputError
from rollout.workloads.infer.bodies import (
    ASKS,
    CHAT,
    EMBED,
    TEXT,
    Embedding,
    embedding_of,
    plain_embedding,
    refuse_keys,
    sampling_of,
    template_of,
)
from rollout.workloads.infer.config import STRUCTURE, SamplingSection
from rollout.workloads.infer.honoured import FORWARDS, LATER, not_honoured
from rollout.workloads.infer.images import digest_of, image_urls
from rollout.workloads.infer.prompts import Prompt, as_written, kind_of, messages_of, prompts_of
from rollout.workloads.infer.tools import Tools, tools_of
from rollout.workloads.json_form import JsonObject, canonical, short

SCHEMA_VERSION = 1
"""The first byte hashed into an item id. It grows when the meaning of a row or sampling key changes."""

_CONTENT = ("prompt", "messages", "embed", "body")

_NAME_IT = 'add one of them, or say which key it is, as columns = { question = "prompt" } in section [input]'

_OVERRIDES = frozenset(SamplingSection.model_fields) - {"stream"}


@dataclass(frozen=True, slots=True)
class RowRequest:
    """Exactly one of `prompts`, `messages`, `embed` and `body` is set. `explicit_seed` means that the row sets its own
    seed. `body` is that of an OpenAI row, without `model`, for a backend that forwards it."""

    sampling: SamplingSection
    prompts: tuple[Prompt, ...] = ()
    messages: tuple[JsonObject, ...] | None = None
    explicit_seed: bool = False
    openai: str = ""  # the url of an OpenAI batch line, else empty
    template: JsonObject = field(default_factory=JsonObject)  # further variables of the chat template
    body: JsonObject | None = None
    embed: Embedding | None = None
    tools: Tools | None = None

    @property
    def chats(self) -> bool:
        """Whether the answer is a chat message."""
        return self.messages is not None or self.openai == CHAT

    @property
    def embeds(self) -> bool:
        """Whether the answer is vectors rather than text."""
        return self.embed is not None or self.openai == EMBED

    @property
    def base64(self) -> bool:
        """Whether vectors are requested as base64 of float32."""
        if self.body is not None:
            return self.body.get("encoding_format") == "base64"
        return self.embed is not None and self.embed.base64

    @property
    def images(self) -> list[str]:
        """URLs of the images in the messages."""
        return image_urls(self.messages if self.body is None else self.body.get("messages"))

    @property
    def content(self) -> JsonObject:
        """The prompt or messages, as the output line shows them."""
        if self.body is not None:
            return {key: self.body[key] for key in ASKS.values() if key in self.body}
        if self.embed is not None:
            return {"input": as_written(self.embed.inputs)}
        return {"prompt": as_written(self.prompts)} if self.messages is None else {"messages": list(self.messages)}


def sampling_json(sampling: SamplingSection) -> JsonObject:
    """Return the sampling keys by name, those of `LATER` only if set. Do not change it: rows without their own share
    it."""
    return _dumped(sampling)[0]


# The run's defaults, which nearly every row uses, and what they are as JSON: dumping them anew is half of a row's cost.
_last: list[tuple[SamplingSection, JsonObject, bytes]] = []


def _dumped(sampling: SamplingSection) -> tuple[JsonObject, bytes]:
    for known, fields, text in _last:
        if known is sampling:
            return fields, text
    fields = sampling.model_dump(mode="json", exclude={"stream", *(LATER - sampling.later)})
    text = canonical(fields)
    _last[:] = [(sampling, fields, text)]
    return fields, text


def parse_row(row: JsonObject, defaults: SamplingSection, kind: str) -> RowRequest:
    """Parse the request of a row for a backend of this kind. Raises InputError with the remedy, without the place."""
    if "body" in row:
        return _parse_openai(row, defaults, kind)
    prompt, messages = row.get("prompt"), row.get("messages")
    if prompt is None and messages is None:
        if row.get("embed") is not None:
            return RowRequest(defaults, embed=plain_embedding(row["embed"], kind))
        others = [key for key in row if key not in _CONTENT]
        near = next(((key, close) for key in others for close in get_close_matches(key, _CONTENT, n=1)), None)
        hint = f'did you mean that by "{near[0]}"?' if near is not None else _NAME_IT
        named = f'"{near[1]}"' if near is not None else '"prompt", "messages", "embed" or "body"'
        raise InputError(f"the row has no {named}: {hint}")
    if prompt is not None and messages is not None:
        raise InputError('the row has both "prompt" and "messages": keep one of them')
    prompts = () if prompt is None else prompts_of(prompt, "prompt")
    checked = None if messages is None else messages_of(messages, "messages", kind)
    override = row.get("sampling")
    if override is None:
        return RowRequest(defaults, prompts, checked)
    if not isinstance(override, dict):
        raise InputError(f'"sampling" must be an object with sampling keys, not {kind_of(override)}')
    override = cast(JsonObject, override)
    unknown = sorted(override.keys() - _OVERRIDES)
    if unknown:
        close = get_close_matches(unknown[0], sorted(_OVERRIDES), n=1)
        hint = f'did you mean "{close[0]}"?' if close else f"known: {', '.join(sorted(_OVERRIDES))}"
        raise InputError(f'"sampling" has the unknown key "{unknown[0]}"; {hint}')
    if isinstance(override.get("json_schema"), str):
        raise InputError('"sampling.json_schema" of a row must be the schema itself, not a path')
    if refused := not_honoured(kind, (key for key, value in override.items() if value is not None)):
        raise InputError(f'"sampling.{refused[0]}" is not supported by backend "{kind}": remove it')
    return RowRequest(_override(defaults, override), prompts, checked, override.get("seed") is not None)


def id_key(row: JsonObject) -> str:
    """Return the field that identifies the row: "custom_id" for an OpenAI line or a row without "id", else "id"."""
    named = isinstance(row.get("custom_id"), str | int) and row.get("id") is None
    return "custom_id" if "body" in row or named else "id"


def _override(defaults: SamplingSection, override: JsonObject, what: str = "sampling") -> SamplingSection:
    if not override:
        return defaults
    try:
        values = {**defaults.model_dump(), **override}
        if any(override.get(key) is not None for key in STRUCTURE):
            values.update({key: override.get(key) for key in STRUCTURE})  # in place of the run's, whichever that is
        return SamplingSection.model_validate(values, strict=True)
    except ValidationError as error:
        said: list[str] = []
        for entry in error.errors(include_url=False):
            place = ".".join([what, *(str(part) for part in entry["loc"][:1])])
            text = f'"{place}" {describe(cast(Mapping[str, Any], entry), place)}'
            if text not in said:
                said.append(text)
        raise InputError("; ".join(said)) from None


def _parse_openai(row: JsonObject, defaults: SamplingSection, kind: str) -> RowRequest:
    body = row["body"]
    if not isinstance(body, dict):
        raise InputError(f'"body" must be an object, not {kind_of(body)}')
    body = cast(JsonObject, body)
    if not isinstance(row.get("custom_id"), str):
        raise InputError('an OpenAI batch line needs a "custom_id" that is a string')
    if row.get("method", "POST") != "POST":
        raise InputError('"method" must be "POST"')
    url = row.get("url", CHAT if "messages" in body else EMBED if "input" in body else TEXT)
    if isinstance(url, str) and not url.startswith("/v1/"):
        url = f"/v1{url}"  # as Azure's batch files have it
    if not isinstance(url, str) or url not in ASKS:
        raise InputError(f'"url" must be {" or ".join(ASKS)}, not {short(row["url"])}')
    if body.get("stream"):
        raise InputError('"body.stream" must be false: a batch does not stream')
    asks = ASKS[url]
    if body.get(asks) is None:
        raise InputError(f'"body.{asks}" is missing: {url} needs it')
    if kind in FORWARDS:
        sent = {key: value for key, value in body.items() if key not in ("model", "stream", "stream_options")}
        return RowRequest(defaults, openai=url, body=sent)
    refuse_keys(body, url, kind)
    if url == EMBED:
        return RowRequest(defaults, openai=url, embed=embedding_of(body, "body"))
    override = sampling_of(body, url)
    sampling = _override(defaults, override, "body")
    explicit = override.get("seed") is not None
    if url == CHAT:
        messages, template, tools = messages_of(body[asks], f"body.{asks}", kind), template_of(body), tools_of(body)
        if tools is not None:
            sampling = _forced(sampling, tools)
            template = {**template, "tools": list(tools.definitions)}
        return RowRequest(sampling, (), messages, explicit, url, template, tools=tools)
    return RowRequest(sampling, prompts_of(body[asks], f"body.{asks}"), None, explicit, url)


def _forced(sampling: SamplingSection, tools: Tools) -> SamplingSection:
    """Return the sampling, with the form of a call if one is required."""
    schema = tools.schema
    if schema is None:
        return sampling
    if any(getattr(sampling, key) is not None for key in STRUCTURE):
        raise InputError('"body.tool_choice" says what form the answer has, as does another key: keep one')
    return sampling.model_copy(update={"json_schema": schema})


def _identity(request: RowRequest) -> JsonObject:
    if request.body is not None:
        return {"url": request.openai, "body": request.body}
    return request.content if request.embed is None else {"embed": request.embed.as_json()}


def adapter_of(row: JsonObject, declared: Collection[str]) -> str:
    """Return the declared adapter that the row names, in "lora" or as the model of an OpenAI body, or "". Raises
    InputError."""
    if not declared:
        return ""
    named = row.get("lora")
    if named is None:
        body = row.get("body")
        named = cast(JsonObject, body).get("model") if isinstance(body, dict) else None
        return named if isinstance(named, str) and named in declared else ""
    if isinstance(named, str) and named in declared:
        return named
    near = get_close_matches(str(named), declared, n=1)
    hint = f'did you mean "{near[0]}"?' if near else "section [model.loras] has " + ", ".join(sorted(declared))
    raise InputError(f'"lora" is {short(named)}, which is no adapter of this run: {hint}')


_NO_IMAGES: Mapping[str, str] = {}


def item_id(
    model_content_id: str, request: RowRequest, index: int, adapter: str = "", images: Mapping[str, str] = _NO_IMAGES
) -> bytes:
    """Return 32 bytes that change with the row's place and everything that affects the result. `images` are those of
    `load_images`."""
    hasher = blake3(bytes([SCHEMA_VERSION]))
    parts = [bytes.fromhex(model_content_id), canonical(_identity(request))]
    if request.embed is None:
        parts.append(_dumped(request.sampling)[1])
    if request.template:
        parts.append(canonical(request.template))
    if request.tools is not None:
        parts.append(canonical([request.tools.choice, request.tools.name, request.tools.parallel]))
    if adapter:
        parts.append(canonical({"lora": adapter}))
    if images:
        parts.append(digest_of(images))
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    hasher.update(index.to_bytes(8, "little"))
    return hasher.digest()


def row_seed(request: RowRequest, identity: bytes) -> int:
    """Return the row's own seed, or 63 bits of its item id. Choice k of a row uses seed + k."""
    if request.explicit_seed and request.sampling.seed is not None:
        return request.sampling.seed
    return int.from_bytes(blake3(b"seed" + identity).digest()[:8], "little") >> 1
