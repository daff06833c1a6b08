"""Conversion of a row, or a gateway's request, to engine requests, and of the engine's answer to a result."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace

from rollout.model.errors import ConfigError
from rollout.workloads.infer.config import STRUCTURE, SamplingSection
from rollout.workloads.infer.images import is_http, with_images
from rollout.workloads.infer.payload import ChoiceResult, RowResult
from rollout.workloads.infer.request import RowRequest
from rollout.workloads.json_form import JsonObject

from rollout_worker.backends.answers import FindCalls, part_calls, part_reasoning
from rollout_worker.backends.port import Backend, Completion, Embed, Request, Sampling
from rollout_worker.executors.fetched_images import fetched


async def with_all_images(request: RowRequest, files: dict[str, str], *, fetch: bool) -> RowRequest:
    """Replace each image that is among `files`, or on a web server (`fetch`), by a data: URL. Raises AttemptError."""
    urls = request.images
    if not urls:
        return request
    data = dict(files)
    for url in dict.fromkeys(urls) if fetch else ():
        if is_http(url):
            data[url] = await asyncio.to_thread(fetched, url)
    if request.messages is not None:
        return replace(request, messages=tuple(with_images(request.messages, data)))
    body = request.body or {}
    return replace(request, body={**body, "messages": with_images(body["messages"], data)})


def engine_requests(
    request: RowRequest, name: str, seed: int, *, adapter: str = "", waits: Callable[[str], None]
) -> list[Request]:
    """Return one engine request, or one per prompt. `name` becomes the `request_id`, which an engine never sees
    twice."""
    sampling = to_sampling(request.sampling, seed)
    if request.tools is not None and request.tools.choice == "auto":
        sampling = replace(sampling, skip_special=False)  # some models mark calls by special tokens
    whole = Request(
        request_id=name,
        sampling=sampling,
        messages=request.messages,
        template=request.template,
        body=request.body,
        url=request.openai if request.body is not None else "",
        adapter=adapter,
        waits=waits,
    )
    if request.embed is not None:
        asked = request.embed
        embeds = [Embed(one, asked.dimensions, asked.pooling) for one in asked.inputs]
        return [_part(replace(whole, embed=embed), at) for at, embed in enumerate(embeds)]
    if not request.prompts:
        return [whole]
    found: list[Request] = []
    for at, prompt in enumerate(request.prompts):
        sampling = replace(whole.sampling, seed=whole.sampling.seed + at * whole.sampling.n)
        one = replace(whole, sampling=sampling)
        one = replace(one, prompt=prompt) if isinstance(prompt, str) else replace(one, prompt_ids=prompt)
        found.append(_part(one, at))
    return found


def _part(request: Request, at: int) -> Request:
    return request if at == 0 else replace(request, request_id=f"{request.request_id}-{at}")


async def answer(backend: Backend, requests: list[Request]) -> Completion:
    """Return the completions of all requests as one, in order. When one fails, the others are cancelled."""
    if len(requests) == 1:
        return await backend.generate(requests[0])
    tasks = [asyncio.ensure_future(backend.generate(request)) for request in requests]
    try:
        found = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    choices = [choice for completion in found for choice in completion.choices]
    vectors = [vector for completion in found for vector in completion.embeddings or ()]
    return Completion(choices, sum(completion.prompt_tokens for completion in found), vectors or None)


def read_answers(completion: Completion, request: RowRequest, find: FindCalls | None = None) -> None:
    """Split reasoning and tool calls from the text of a chat's answers. A server that was sent the row's body has
    already done so."""
    if request.messages is None:
        return
    tools = request.tools
    for choice in completion.choices:
        if has_reasoning(request) and choice.reasoning is None:
            part_reasoning(choice, thinking=completion.thinking)
        if tools is not None and tools.choice != "none" and choice.tool_calls is None:
            part_calls(choice, tools, find)


def has_reasoning(request: RowRequest) -> bool:
    """Return whether reasoning is split from the answers; a structured form leaves no room for it."""
    return all(getattr(request.sampling, key) is None for key in STRUCTURE)


def to_sampling(section: SamplingSection, seed: int) -> Sampling:
    if isinstance(section.json_schema, str):
        raise ConfigError("sampling.json_schema must be resolved before a run is submitted")
    return Sampling(
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        min_p=section.min_p,
        max_tokens=section.max_tokens,
        min_tokens=section.min_tokens,
        stop=tuple(section.stop),
        seed=seed,
        n=section.n,
        logprobs=section.logprobs,
        presence_penalty=section.presence_penalty,
        frequency_penalty=section.frequency_penalty,
        repetition_penalty=section.repetition_penalty,
        json_schema=section.json_schema,
        ignore_eos=section.ignore_eos,
        logit_bias={int(token): bias for token, bias in (section.logit_bias or {}).items()},
        stop_ids=tuple(section.stop_token_ids),
        allowed_ids=tuple(section.allowed_token_ids or ()),
        bad_words=tuple(section.bad_words),
        include_stop=section.include_stop_str_in_output,
        skip_special=section.skip_special_tokens,
        regex=section.regex,
        choice=tuple(section.choice or ()),
        grammar=section.grammar,
        seed_given=section.seed is not None,
    )


def row_result(completion: Completion, tag: str = "") -> RowResult:
    choices = tuple(
        ChoiceResult(
            choice.text,
            choice.finish_reason,
            choice.tokens,
            finite(choice.logprobs),
            choice.tool_calls,
            choice.reasoning,
            choice.refusal,
            choice.note,
        )
        for choice in completion.choices
    )
    vectors = completion.embeddings
    embeddings = None if vectors is None else tuple(tuple(vector) for vector in vectors)
    return RowResult(choices, completion.prompt_tokens, tag, embeddings)


UNLIKELY = -9999.0
"""Replacement for the logarithm of 0, which JSON cannot express, as in OpenAI's API."""


def finite(logprobs: list[JsonObject] | None) -> list[JsonObject] | None:
    """Return the logprobs with numbers that JSON can express."""
    for token in logprobs or ():
        for one in (token, *token["top"]):
            if not math.isfinite(one["logprob"]):
                one["logprob"] = UNLIKELY
    return logprobs
