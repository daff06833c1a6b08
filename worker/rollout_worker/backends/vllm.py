"""The `vllm` backend: vLLM's AsyncLLM inside the engine child, on GPUs or the CPU.

Options: those of [backend], `revision`, and `engine`, whose keys are passed to AsyncEngineArgs. Versions of vLLM
differ, so arguments are passed only if the installed version has them.
"""

# The engine's own types are incomplete or, where it is not installed, absent.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import structlog
from rollout.model.errors import AttemptError
from rollout.model.problems import problems
from rollout.workloads.engine_options import unknown_options

from rollout_worker.backends.adapters import adapter_directories, highest_rank
from rollout_worker.backends.environment import number_devices
from rollout_worker.backends.going_on import GoingOn
from rollout_worker.backends.lifeline import die, hold
from rollout_worker.backends.loading import brief, find_on_hub, load_failure
from rollout_worker.backends.local_engine import LocalEngine, not_started
from rollout_worker.backends.port import (
    Backend,
    BackendOptions,
    Begun,
    Choice,
    Completion,
    Delta,
    Embed,
    Request,
    Sampling,
    cannot_continue,
)
from rollout_worker.backends.tokens import TextCodec
from rollout_worker.backends.vectors import unit
from rollout_worker.backends.vision import has_images, no_images
from rollout_worker.backends.vllm_tools import ToolReader
from rollout_worker.backends.vllm_weights import PolicyWeights

_log = structlog.get_logger()

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM supports; the lowest sufficient one is used."""
LORAS_AT_ONCE = 8
"""Maximum number of adapters in a batch: each takes device memory."""


def open_backend(config: BackendOptions) -> Backend:
    return VllmBackend(config)


class VllmBackend(LocalEngine):
    whole_updates: ClassVar[bool] = True  # what it makes of several tensors, it makes of all of them or none

    def __init__(self, config: BackendOptions) -> None:
        super().__init__(config)
        self._engine: Any = None
        self.calls_in: ToolReader | None = None
        self._adapters: dict[str, Any] = {}  # LoRARequest, by the name that rows use

    async def start(self) -> None:
        number_devices()
        try:
            import vllm
        except ImportError as error:
            raise AttemptError(
                f"the vllm backend cannot be imported: {error}: pip install 'rollout-engine[vllm]', or on a CPU "
                "host see the operator's guide",
                code="backend_missing",
                retry=False,
            ) from error
        self._choose_device()  # asked of torch: vLLM falls back to the CPU silently where CUDA is half installed
        adapters = await asyncio.to_thread(adapter_directories, self._config.adapters)
        arguments = self._arguments(vllm.AsyncEngineArgs, adapters)
        await asyncio.to_thread(find_on_hub, self._config.model, self._options.get("revision"))
        hold()
        try:
            # In the loop's thread: AsyncLLM binds to the running loop.
            self._engine = vllm.AsyncLLMEngine.from_engine_args(vllm.AsyncEngineArgs(**arguments))
        except (OSError, ValueError, RuntimeError, KeyError, TypeError, ImportError, AssertionError) as error:
            raise load_failure(f"vLLM cannot load {self._config.model}", error) from error
        await self._add(adapters)
        model_config: Any = self._engine.model_config
        codec = await asyncio.to_thread(self._load_codec, int(model_config.max_model_len))
        if parser := self._options.get("tool_parser"):
            self.calls_in = await asyncio.to_thread(ToolReader, str(parser), codec.tokenizer)
        if getattr(model_config, "is_multimodal_model", False):
            await asyncio.to_thread(self._load_vision)

    async def _add(self, adapters: Mapping[str, str]) -> None:
        if not adapters:
            return
        from vllm.lora.request import LoRARequest

        for number, (name, path) in enumerate(adapters.items(), 1):
            request = self._adapters[name] = LoRARequest(name or "lora", number, path)
            try:
                await self._engine.add_lora(request)
            except Exception as error:
                raise load_failure(f"vLLM cannot load the adapter {self._config.adapters[name]}", error) from error

    async def close(self) -> None:
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.shutdown()

    async def generate(self, request: Request) -> Completion:
        if self._engine is None or self._codec is None:
            raise not_started()
        if request.embed is not None:
            return await self._embed(self._codec.encode(request), request.embed, request)
        if has_images(request):
            return await self._see(request, self._codec)
        prompts, sampling = (
            self._codec.encode_each(self._vision.plain(request) if self._vision else request),
            request.sampling,
        )
        if not sampling.seeds:
            thinking = self._codec.thinking(request, prompts[0])
            if request.on_begin is not None:
                request.on_begin(Begun(len(prompts[0]), thinking))
            if request.on_delta is not None:
                choices, _ = await self._streamed(request, request.on_delta, {"prompt_token_ids": prompts[0]})
            else:
                choices, _ = await self._complete(prompts[0], sampling, request.request_id, request.adapter)
            return Completion(choices, len(prompts[0]), thinking=thinking)
        limits = sampling.limits or [sampling.max_tokens] * sampling.n
        each = [
            replace(sampling, n=1, seed=seed, max_tokens=limit)
            for seed, limit in zip(sampling.seeds, limits, strict=True)
        ]
        rows = [
            asyncio.create_task(self._complete(prompt, own, f"{request.request_id}-{at}", request.adapter))
            for at, (prompt, own) in enumerate(zip(prompts, each, strict=True))
        ]
        try:
            choices = [choice for found, _ in await asyncio.gather(*rows) for choice in found]
        finally:
            for row in rows:
                row.cancel()
        return Completion(choices, len(prompts[0]))

    async def _see(self, request: Request, codec: TextCodec) -> Completion:
        if self._vision is None:
            raise no_images(self._config.model)
        text, images = await asyncio.to_thread(self._vision.text_and_images, request)
        prompt = codec.checked(codec.text_ids(text), request)
        thinking = codec.thinking(request, prompt)
        if request.on_begin is not None:
            request.on_begin(Begun(0, thinking))  # vLLM makes room for the images, and says how much at the end
        if request.on_delta is not None:
            asked = {"prompt_token_ids": prompt, "multi_modal_data": {"image": images}}
            choices, tokens = await self._streamed(request, request.on_delta, asked)
        else:
            own = request.sampling, request.request_id, request.adapter
            choices, tokens = await self._complete(prompt, *own, images)
        return Completion(choices, tokens, thinking=thinking)

    async def _complete(
        self, prompt: list[int], sampling: Sampling, request_id: str, adapter: str, images: list[Any] | None = None
    ) -> tuple[list[Choice], int]:
        """Return the choices, and the number of prompt tokens, which includes vLLM's placeholders for `images`."""
        asked: dict[str, Any] = {"prompt_token_ids": prompt}
        if images:
            asked["multi_modal_data"] = {"image": images}
        try:
            parameters = sampling_params(sampling)
            stream = self._engine.generate(asked, parameters, request_id, lora_request=self._adapters.get(adapter))
            # Closing the stream, which cancellation does too, aborts the request in the engine.
            final: Any = None
            async for output in stream:
                final = output
        except Exception as error:
            raise self._typed(error) from error
        if final is None or not final.finished:
            raise AttemptError("vLLM ended the row without a completion", code="engine_error")
        choices = [self._choice(output, sampling, prompt) for output in sorted(final.outputs, key=lambda o: o.index)]
        for choice in choices:
            if choice.finish_reason not in ("stop", "length"):
                raise AttemptError(f"vLLM ended the row with {choice.finish_reason!r}", code="engine_error")
        return choices, len(final.prompt_token_ids or prompt)

    async def _streamed(
        self, request: Request, on_delta: Callable[[Delta], None], asked: dict[str, Any]
    ) -> tuple[list[Choice], int]:
        """Complete one request, token by token."""
        prompt: list[int] = asked["prompt_token_ids"]
        going: GoingOn | None = None
        sampling = request.sampling
        if request.so_far:
            if "multi_modal_data" in asked:
                raise cannot_continue("it has images")
            going = GoingOn(self.tokens(), prompt, request)
            asked, sampling = {"prompt_token_ids": [*prompt, *request.so_far]}, going.sampling
            on_delta(going.repeated)
        streams = [_Streamed(index, request.sampling.logprobs, self._logprob) for index in range(sampling.n)]
        tokens = len(prompt)
        try:
            parameters = sampling_params(sampling, streams=True, detokenize=going is None)
            lora = self._adapters.get(request.adapter)
            outputs = self._engine.generate(asked, parameters, request.request_id, lora_request=lora)
            # Closing the stream, which cancellation does too, aborts the request in the engine.
            async with aclosing(outputs):
                async for output in outputs:
                    if going is None:
                        tokens = len(output.prompt_token_ids or prompt)
                    for one in output.outputs:
                        delta = streams[one.index].add(one)
                        if going is not None:
                            delta = going.shown(delta, str(one.finish_reason or ""))
                        if delta.ids or delta.text or delta.last:
                            on_delta(delta)
                    if going is not None and going.whole is not None:
                        break
        except Exception as error:
            raise self._typed(error) from error
        choices = [going.whole] if going is not None and going.whole is not None else [one.choice() for one in streams]
        for choice in choices:
            if choice.finish_reason not in ("stop", "length"):
                raise AttemptError(f"vLLM ended the row with {choice.finish_reason!r}", code="engine_error")
        return choices, tokens

    async def _embed(self, prompt: list[int], embed: Embed, request: Request) -> Completion:
        from vllm import PoolingParams

        final: Any = None
        try:
            parameters = PoolingParams(task="embed")
            given, lora = {"prompt_token_ids": prompt}, self._adapters.get(request.adapter)
            async for output in self._engine.encode(given, parameters, request.request_id, lora_request=lora):
                final = output
        except Exception as error:
            raise self._typed(error) from error
        if final is None or not final.finished:
            raise AttemptError("vLLM ended the row without an embedding", code="engine_error")
        return Completion([], len(prompt), [unit(final.outputs.data.float().tolist(), embed.dimensions)])

    async def load_weights(self, files: Mapping[Path, Sequence[str]]) -> None:
        if self._engine is None:
            raise not_started()
        given = {str(path): list(names) for path, names in files.items()}
        try:
            await self._engine.collective_rpc("load_policy_weights", args=(given,))
            fresh = await self._engine.reset_prefix_cache()
        except Exception as error:
            raise AttemptError(f"vLLM cannot load the weights: {brief(error)}", code="engine_error") from error
        if not fresh:
            raise AttemptError("vLLM still has rows of the weights before", code="engine_error")

    def _typed(self, error: Exception) -> AttemptError:
        if self._engine is not None and getattr(self._engine, "errored", False):
            # Its core process is gone for good. As a crash of this process the daemon starts another engine, and counts
            # a loss for every row that ran, so that a row that keeps killing engines ends up running alone.
            _log.critical("engine_dead", error=repr(error), model=self._config.model)
            die()
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if isinstance(error, ValueError | TypeError | NotImplementedError) or "VLLMClientError" in kinds:
            return AttemptError(f"vLLM refuses the row: {error}", code="bad_request", retry=False)
        cause = error.__cause__ or error
        return AttemptError(f"vLLM failed: {cause!r}", code="engine_error")

    def _choice(self, output: Any, sampling: Sampling, prompt: list[int]) -> Choice:
        logprobs = None
        if sampling.logprobs is not None and output.logprobs is not None:
            pairs = zip(output.token_ids, output.logprobs, strict=True)
            logprobs = [self._logprob(token, found, sampling.logprobs) for token, found in pairs]
        choice = Choice(output.text, str(output.finish_reason), len(output.token_ids), logprobs)
        choice.stop_reason = output.stop_reason
        if sampling.ids and self._codec is not None:
            choice.ids = list(output.token_ids)
            pairs = zip(output.token_ids, output.logprobs or (), strict=True)
            choice.id_logprobs = [float(found[token].logprob) for token, found in pairs]
            if not sampling.stop:
                choice.text = self._codec.decode(prompt, choice.ids)
        return choice

    def _logprob(self, token: int, found: Any, top: int) -> dict[str, Any]:
        name = self.tokens().name

        def shown(token: int) -> dict[str, Any]:
            """Return a token, without a name if it is part of a character, like vLLM's server."""
            known = found[token].decoded_token
            return {"token": name(token) if known is None else known, "logprob": float(found[token].logprob)}

        ranked = sorted(found, key=lambda other: found[other].rank)[:top]
        return {**shown(token), "top": [shown(other) for other in ranked]}

    def _arguments(self, kind: Any, adapters: Mapping[str, str]) -> dict[str, Any]:
        known = {field.name for field in dataclasses.fields(kind)}
        options, cpu = self._options, self._device == "cpu"
        wanted: dict[str, Any] = {
            "model": self._config.model,
            "tokenizer": self._config.tokenizer,
            "revision": options.get("revision"),
            "device": self._device,  # gone from newer versions, which decide by the build
            "dtype": options.get("dtype"),
            "max_model_len": options.get("max_model_len"),
            "max_num_seqs": self._concurrency,
            "gpu_memory_utilization": None if cpu else options.get("gpu_memory_utilization"),
            "tensor_parallel_size": options.get("tensor_parallel_size"),
            "enforce_eager": cpu if options.get("enforce_eager") is None else options["enforce_eager"],
            "trust_remote_code": options.get("trust_remote_code"),
            "enable_prefix_caching": True,
            "max_logprobs": 20,
            "disable_log_stats": True,
            "enable_log_requests": False,
            "disable_log_requests": True,
            # Sampling is this product's: what a model's generation_config suggests must not slip in.
            "generation_config": "vllm",
            # One library for JSON schema in every backend, and no white space that a model could emit without end.
            "structured_outputs_config": {"backend": "guidance", "disable_any_whitespace": True},
            "guided_decoding_backend": "guidance",
            "guided_decoding_disable_any_whitespace": True,
        }
        if adapters:
            rank = highest_rank(adapters.values())
            wanted["enable_lora"] = True
            wanted["max_lora_rank"] = next((one for one in LORA_RANKS if one >= rank), rank)
            wanted["max_loras"] = min(len(adapters), LORAS_AT_ONCE)
            wanted["max_cpu_loras"] = len(adapters) + cpu
        if self._config.trained:
            wanted["worker_extension_cls"] = f"{PolicyWeights.__module__}.{PolicyWeights.__name__}"
            wanted["logprobs_mode"] = "processed_logprobs"
        if cpu:
            wanted["distributed_executor_backend"] = "uni"
        arguments = {name: value for name, value in wanted.items() if name in known and value is not None}
        extra = dict(options.get("engine") or {})
        if unknown := list(unknown_options(extra, known)):
            faults = problems(f"backend.engine.{name} {why}" for name, why in unknown)
            raise AttemptError(faults, code="model_load_failed", retry=False)
        if adapters and cpu:
            # vLLM's kernels for CPUs give a row without an adapter the last place's, which is to be none's.
            extra["max_loras"] = len(adapters) + 1
        return {**arguments, **extra}


class _Streamed:
    """A streamed choice of a request."""

    def __init__(self, index: int, top: int | None, name: Callable[[int, Any, int], dict[str, Any]]) -> None:
        self._index = index
        self._top = top
        self._name = name
        self._text: list[str] = []
        self._tokens = 0
        self._logprobs: list[dict[str, Any]] = []
        self._finish = ""
        self._stop: str | int | None = None

    def add(self, output: Any) -> Delta:
        ids = tuple(output.token_ids)
        logprobs: tuple[dict[str, Any], ...] = ()
        if self._top is not None and output.logprobs:
            pairs = zip(ids, output.logprobs, strict=True)
            logprobs = tuple(self._name(token, found, self._top) for token, found in pairs)
        self._text.append(output.text)
        self._tokens += len(ids)
        self._logprobs += logprobs
        self._finish = str(output.finish_reason or "")
        self._stop = output.stop_reason
        return Delta(self._index, output.text, ids, logprobs, last=bool(self._finish))

    def choice(self) -> Choice:
        logprobs = None if self._top is None else self._logprobs
        return Choice("".join(self._text), self._finish, self._tokens, logprobs, stop_reason=self._stop)


def sampling_params(sampling: Sampling, *, streams: bool = False, detokenize: bool = True) -> Any:
    """Return vLLM's SamplingParams. `streams` asks for output with each step, `detokenize` for text. Raises ValueError
    if vLLM refuses them."""
    from vllm import SamplingParams

    wanted: dict[str, Any] = {
        "n": sampling.n,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "seed": sampling.seed,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_ids) or None,
        "logit_bias": sampling.logit_bias or None,
        "allowed_token_ids": list(sampling.allowed_ids) or None,
        "bad_words": list(sampling.bad_words) or None,
        "include_stop_str_in_output": sampling.include_stop,
        "skip_special_tokens": sampling.skip_special,
        "logprobs": 0 if sampling.ids and sampling.logprobs is None else sampling.logprobs,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "ignore_eos": sampling.ignore_eos,
        "detokenize": bool(detokenize and (not sampling.ids or sampling.stop)),
        **_output_kind("DELTA" if streams else "FINAL_ONLY"),
    }
    if sampling.structure is not None:
        wanted.update(_structured(*sampling.structure))
    return SamplingParams(**wanted)


def _output_kind(name: str) -> dict[str, Any]:
    """Ask for the finished completion only, unless it is streamed: token by token, the event loop would be the
    bottleneck."""
    try:
        from vllm.sampling_params import RequestOutputKind
    except ImportError:
        return {}
    return {"output_kind": RequestOutputKind[name]}


def _structured(form: str, value: Any) -> dict[str, Any]:
    """Return this version's argument for structured output, which vLLM 0.11 renamed."""
    import vllm.sampling_params as module

    given: dict[str, Any] = {form: json.dumps(value) if form == "json" else value}
    kind: Any = getattr(module, "StructuredOutputsParams", None)
    if kind is not None:
        return {"structured_outputs": kind(**given)}
    older: Any = getattr(module, "GuidedDecodingParams")  # noqa: B009 - absent from the versions types are read from
    arguments = dict(given)
    if "backend" in inspect.signature(older).parameters:
        arguments["backend"] = "auto"
    return {"guided_decoding": older(**arguments)}
