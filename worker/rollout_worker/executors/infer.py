"""The executor of the `infer` workload: rows to a backend's continuous batch and back."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import ClassVar, Literal

import structlog
from blake3 import blake3
from rollout.model.errors import AttemptError, ConfigError, InputError
from rollout.workloads.infer.config import STRUCTURE, SamplingSection
from rollout.workloads.infer.honoured import FORWARDS
from rollout.workloads.infer.images import is_http, with_images
from rollout.workloads.infer.payload import ChoiceResult, RowResult, decode_payload, encode_result
from rollout.workloads.infer.request import RowRequest, adapter_of, canonical, parse_row, row_seed
from rollout.workloads.invalid import refuse_invalid
from rollout.workloads.json_form import JsonObject

from rollout_worker.backends.answers import FindCalls, part_calls, part_reasoning
from rollout_worker.backends.environment import engine_devices, engine_environment
from rollout_worker.backends.opening import open_backend
from rollout_worker.backends.port import Backend, BackendOptions, Completion, Embed, EngineFaultError, Request, Sampling
from rollout_worker.executors.fetched_images import fetched
from rollout_worker.executors.port import Attempt, Context, Done, Run, UnsuitableError, remember
from rollout_worker.executors.trees import locate_adapters, locate_model

_log = structlog.get_logger()
ENGINE_WAITS = "engine_waits"
"""Code of what rows wait for that their engine needs from outside, such as its server."""


class InferExecutor:
    placement: ClassVar[Literal["engine", "shared", "slot"]] = "engine"

    def __init__(self) -> None:
        self._backend: Backend | None = None
        self._sampling: dict[str, SamplingSection] = {}
        self._calls = 0

    @property
    def concurrency(self) -> int:
        return self._backend.concurrency if self._backend else 1

    @property
    def ahead(self) -> int:
        """A whole batch: where all rows are of one length they end in one step, and the next must be there."""
        return self.concurrency

    @classmethod
    def engine_key(cls, run: Run) -> str:
        model = run.config["model"]
        identity = {key: model.get(key) for key in ("content_id", "uri", "tokenizer", "revision")}
        return blake3(canonical([identity, run.config["backend"]])).hexdigest()[:32]

    @classmethod
    def environment(cls, run: Run) -> dict[str, str]:
        model: JsonObject = run.config["model"]
        adapters: dict[str, JsonObject] = model.get("adapters") or {}
        local = all(one.get("local") for one in (model, *adapters.values()))
        return engine_environment(run.config["backend"], local_model=local)

    @classmethod
    def devices(cls, run: Run) -> int:
        return engine_devices(run.config["backend"])

    @classmethod
    def replicas(cls, run: Run) -> int:
        wanted = run.config["backend"].get("replicas", 1)
        return 0 if wanted == "auto" else int(wanted)

    async def start(self, run: Run, context: Context) -> None:
        """Bring the model here and load it. AttemptError (not retryable) says what is missing."""
        backend = dict(run.config["backend"])
        kind = str(backend.pop("kind"))
        model, tokenizer = await locate_model(run.config["model"], context)
        if run.config["model"].get("revision"):
            backend["revision"] = run.config["model"]["revision"]
        adapters = await locate_adapters(run.config["model"], context)
        options = BackendOptions(model=model, tokenizer=tokenizer, kind=kind, options=backend, adapters=adapters)
        opened = open_backend(options)
        await opened.start()
        self._backend = opened
        _log.info("engine_ready", backend=kind, device=opened.device, concurrency=opened.concurrency, run_id=run.run_id)

    async def run(self, attempt: Attempt, context: Context) -> Done:
        if self._backend is None:
            raise AttemptError("the engine is not started", code="engine_not_started")
        refuse_invalid(attempt.payload)
        try:
            payload = decode_payload(attempt.payload)
            kind = str(attempt.run.config["backend"]["kind"])
            request = parse_row(payload.row, self._defaults(attempt.run), kind)
            adapter = adapter_of(payload.row, attempt.run.config["model"].get("loras") or ())
        except InputError as error:
            raise AttemptError(error.message, code="bad_request", retry=False) from error
        request = await with_all_images(request, payload.images, fetch=kind not in FORWARDS)
        self._calls += 1
        waits = partial(context.hindered, code=ENGINE_WAITS)
        try:
            asked = [replace(one, adapter=adapter) for one in engine_requests(request, attempt, self._calls, waits)]
            completion = await answer(self._backend, asked)
        except EngineFaultError as error:
            raise UnsuitableError(error.message, code=error.error_code, retry=error.retry) from error
        if not completion.choices and not completion.embeddings:
            raise AttemptError("the backend returned no completion", code="empty_completion")
        read_answers(completion, request, getattr(self._backend, "calls_in", None))
        data = encode_result(row_result(completion, payload.tag))
        units_out = sum(choice.tokens for choice in completion.choices)
        return Done(data, units_in=completion.prompt_tokens, units_out=units_out)

    def hold(self, on: bool) -> None:
        hold: Callable[[bool], None] | None = getattr(self._backend, "hold", None)
        if hold is not None:
            hold(on)

    async def close(self) -> None:
        if self._backend is not None:
            backend, self._backend = self._backend, None
            await backend.close()

    def _defaults(self, run: Run) -> SamplingSection:
        defaults = self._sampling.get(run.run_id)
        if defaults is None:
            sampling = SamplingSection.model_validate(run.config["sampling"])
            defaults = remember(self._sampling, run.run_id, sampling)
        return defaults


async def with_all_images(request: RowRequest, files: dict[str, str], *, fetch: bool) -> RowRequest:
    """With a data: URL in the place of each image that is among `files`, or on a web server (`fetch`). AttemptError."""
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


def engine_requests(request: RowRequest, attempt: Attempt, call: int, waits: Callable[[str], None]) -> list[Request]:
    """One, or one of each prompt. `request_id` differs between attempts, and between calls for one that was given back:
    an engine never sees one id twice. What comes before the dot names the attempt."""
    sampling = to_sampling(request.sampling, row_seed(request, attempt.id))
    if request.tools is not None and request.tools.choice == "auto":
        sampling = replace(sampling, skip_special=False)  # some models mark calls by special tokens
    whole = Request(
        request_id=f"{attempt.id.hex()}-{attempt.attempt}.{call}",
        sampling=sampling,
        messages=request.messages,
        template=request.template,
        body=request.body,
        url=request.openai if request.body is not None else "",
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
    """The completions of all, as one, in their order. When one fails, the others are cancelled."""
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
    """Part reasoning and calls of tools from the text of a chat's answers. A server that was sent the row's body has
    done so."""
    if request.messages is None:
        return
    tools, sampling = request.tools, request.sampling
    free = all(getattr(sampling, key) is None for key in STRUCTURE)
    for choice in completion.choices:
        if free and choice.reasoning is None:  # a form leaves no room for it
            part_reasoning(choice, thinking=completion.thinking)
        if tools is not None and tools.choice != "none" and choice.tool_calls is None:
            part_calls(choice, tools, find)


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
            _finite(choice.logprobs),
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
"""In place of the logarithm of 0, for which JSON has no number: as OpenAI's interface has it."""


def _finite(logprobs: list[JsonObject] | None) -> list[JsonObject] | None:
    for token in logprobs or ():
        for one in (token, *token["top"]):
            if not math.isfinite(one["logprob"]):
                one["logprob"] = UNLIKELY
    return logprobs
