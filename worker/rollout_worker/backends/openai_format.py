"""Converts a row to the body of an OpenAI-compatible request, and the answer to a completion."""

from __future__ import annotations

import base64
import json
import struct
from dataclasses import fields
from typing import Any, cast

from rollout.workloads.infer.images import image_urls

from rollout_worker.backends.port import Choice, Completion, Request, Sampling
from rollout_worker.json_fields import count, listed, table, text

CHAT, TEXT, EMBEDDINGS = "/chat/completions", "/completions", "/embeddings"
CHARACTERS_PER_TOKEN = 4
"""A rough average for English, used only to estimate a request's tokens before its answer reports them."""
TOKENS_PER_IMAGE = 1000
_SAME_NAME = (
    "temperature", "top_p", "n", "presence_penalty", "frequency_penalty", "top_k", "min_p", "min_tokens",
    "repetition_penalty", "ignore_eos",
)  # fmt: skip
_OF_VLLM = {
    "stop_ids": "stop_token_ids",
    "allowed_ids": "allowed_token_ids",
    "bad_words": "bad_words",
    "include_stop": "include_stop_str_in_output",
    "skip_special": "skip_special_tokens",
}
"""Names of parameters that only vLLM's server has."""
_DEFAULTS = {field.name: field.default for field in fields(Sampling)}

Json = dict[str, Any]


class BadAnswerError(ValueError):
    """The answer does not fit the request. The message says why."""


def path_and_body(request: Request, model: str, limit_key: str) -> tuple[str, Json]:
    """Return path and body. `limit_key` is the server's name for the token limit of a chat answer. A row's own body is
    sent unchanged."""
    if request.body is not None:
        return request.url.removeprefix("/v1"), {"model": model, **request.body}
    if request.embed is not None:
        given = request.embed.input
        body: Json = {"model": model, "input": given if isinstance(given, str) else list(given)}
        if request.embed.dimensions is not None:
            body["dimensions"] = request.embed.dimensions
        return EMBEDDINGS, body
    chat = request.messages is not None
    if chat:
        body = {"model": model, "messages": list(request.messages or ())}
    else:
        body = {"model": model, "prompt": request.prompt if request.prompt_ids is None else list(request.prompt_ids)}
    body |= _sampling(request.sampling, chat, limit_key)
    if request.template:
        body["chat_template_kwargs"] = request.template
    return (CHAT if chat else TEXT), body


def _sampling(sampling: Sampling, chat: bool, limit_key: str) -> Json:
    """Return only parameters that differ from a server's defaults, because many servers support few of them."""
    given: Json = {limit_key if chat else "max_tokens": sampling.max_tokens}
    for name in _SAME_NAME:
        value = getattr(sampling, name)
        if value != _DEFAULTS[name]:
            given[name] = value
    for name, theirs in _OF_VLLM.items():
        value = getattr(sampling, name)
        if value != _DEFAULTS[name]:
            given[theirs] = list(cast("tuple[Any, ...]", value)) if isinstance(value, tuple) else value
    if sampling.logit_bias:
        given["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.seed_given:
        given["seed"] = sampling.seed
    if sampling.stop:
        given["stop"] = list(sampling.stop)
    if sampling.logprobs is not None:
        given |= {"logprobs": True, "top_logprobs": sampling.logprobs} if chat else {"logprobs": sampling.logprobs}
    match sampling.structure:
        case None:
            pass
        case "json", schema:
            named = {"name": "completion", "schema": schema, "strict": True}
            given["response_format"] = {"type": "json_schema", "json_schema": named}
        case kind, form:
            given["structured_outputs"] = {kind: form}
    return given


def estimated_tokens(body: Json, size: int, typical: float) -> float:
    """Estimate the tokens of a request whose body has `size` bytes. `typical` is the average completion so far, used if
    the body has no limit."""
    images = image_urls(body.get("messages"))
    size = max(0, size - sum(map(len, images)) + len(images) * TOKENS_PER_IMAGE * CHARACTERS_PER_TOKEN)
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    each = limit if isinstance(limit, int) else typical
    n = body.get("n")
    return size / CHARACTERS_PER_TOKEN + each * (n if isinstance(n, int) else 1)


def completion_of(answer: Json, path: str) -> Completion:
    """Convert an answer. Raises BadAnswerError."""
    usage = table(answer.get("usage"))
    prompt_tokens = count(usage.get("prompt_tokens"))
    if path == EMBEDDINGS:
        return Completion([], prompt_tokens, _vectors(answer))
    given = answer.get("choices")
    if not isinstance(given, list) or not given:
        raise BadAnswerError("it has no choices")
    chat = path == CHAT
    choices = [choice_of(table(one), chat=chat) for one in sorted(cast(list[Any], given), key=_index)]
    _share(choices, count(usage.get("completion_tokens")))
    return Completion(choices, prompt_tokens)


def _share(choices: list[Choice], tokens: int) -> None:
    """Divide the tokens of a row evenly between completions: servers count only those of the row."""
    unknown = [choice for choice in choices if not choice.tokens]
    left = tokens - sum(choice.tokens for choice in choices)
    if not unknown or left <= 0:
        return
    each, more = divmod(left, len(unknown))
    for place, choice in enumerate(unknown):
        choice.tokens = each + (place < more)


def choice_of(fields: Json, *, chat: bool) -> Choice:
    """Convert a choice. Raises BadAnswerError."""
    finish = str(fields.get("finish_reason") or "stop")
    if not chat:
        if not isinstance(fields.get("text"), str):
            raise BadAnswerError("a choice has no text")
        logprobs = _text_logprobs(fields.get("logprobs"))
        return Choice(text(fields["text"]), finish, len(logprobs or ()), logprobs)
    if not isinstance(fields.get("message"), dict):
        raise BadAnswerError("a choice has no message")
    message = table(fields["message"])
    logprobs = _chat_logprobs(fields.get("logprobs"))
    calls = [_call(table(call), n) for n, call in enumerate(listed(message.get("tool_calls")))]
    reasoning = text(message.get("reasoning_content") or message.get("reasoning"))
    return Choice(
        text(message.get("content")),
        finish,
        len(logprobs or ()),
        logprobs,
        tool_calls=calls or None,
        reasoning=reasoning or None,
        refusal=text(message.get("refusal")) or None,
    )


def _call(fields: Json, number: int) -> Json:
    function = table(fields.get("function"))
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str):
        raise BadAnswerError("a tool call has no name of a function")
    if not isinstance(arguments, str):  # Ollama gives an object
        arguments = json.dumps(arguments if arguments is not None else {}, ensure_ascii=False)
    return {
        "id": str(fields.get("id") or f"call_{number}"),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _chat_logprobs(value: Any) -> list[Json] | None:
    content = table(value).get("content")
    if not isinstance(content, list):
        return None
    found: list[Json] = []
    for token in map(table, cast(list[Any], content)):
        top = [_logprob(one.get("token"), one.get("logprob")) for one in map(table, listed(token.get("top_logprobs")))]
        found.append({**_logprob(token.get("token"), token.get("logprob")), "top": top})
    return found


def _text_logprobs(value: Any) -> list[Json] | None:
    fields = table(value)
    tokens, logprobs = fields.get("tokens"), fields.get("token_logprobs")
    if not isinstance(tokens, list) or not isinstance(logprobs, list):
        return None
    tops = listed(fields.get("top_logprobs"))
    found: list[Json] = []
    for place, (token, logprob) in enumerate(zip(cast(list[Any], tokens), cast(list[Any], logprobs), strict=False)):
        top = table(tops[place]) if place < len(tops) else {}
        found.append({**_logprob(token, logprob), "top": [_logprob(*one) for one in top.items()]})
    return found


def _logprob(token: Any, logprob: Any) -> Json:
    if logprob is None:  # of the first token of an echoed prompt
        logprob = 0.0
    if not isinstance(token, str) or not isinstance(logprob, int | float):
        raise BadAnswerError("a token of logprobs has no token or logprob")
    return {"token": token, "logprob": float(logprob)}


def _vectors(answer: Json) -> list[list[float]]:
    data = answer.get("data")
    if not isinstance(data, list) or not data:
        raise BadAnswerError("it has no data")
    return [_vector(table(one).get("embedding")) for one in sorted(cast(list[Any], data), key=_index)]


def _vector(value: Any) -> list[float]:
    try:
        if isinstance(value, str):
            raw = base64.b64decode(value, validate=True)
            return list(struct.unpack(f"<{len(raw) // 4}f", raw))
        return [float(number) for number in cast(list[Any], value)]
    except (TypeError, ValueError, struct.error):
        raise BadAnswerError("an embedding is neither a list of numbers nor base64 of float32") from None


def _index(value: Any) -> int:
    index = table(value).get("index")
    return index if isinstance(index, int) else 0
