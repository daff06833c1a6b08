"""The `transformers` backend: any causal model of Hugging Face, on a GPU or the CPU, in a continuous batch.

Options: those of [backend] (dtype, device, max_model_len, max_num_seqs, trust_remote_code), `revision`, and `engine`,
whose keys are passed to AutoModelForCausalLM.from_pretrained.
"""

# The engine's own types are incomplete or, where it is not installed, absent.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from rollout.model.errors import AttemptError

from rollout_worker.backends.adapters import adapter_directories
from rollout_worker.backends.batch import ContinuousBatch, Sequence
from rollout_worker.backends.constraint import ConstraintFactory
from rollout_worker.backends.embedding import Embedder, pooling_of
from rollout_worker.backends.loading import find_on_hub, load_failure, other_model
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
    cannot_continue,
)
from rollout_worker.backends.tokens import TextCodec, TextStream
from rollout_worker.backends.vectors import unit
from rollout_worker.backends.vision import has_images, no_images

_WRITERS = ("CausalLM", "LMHead", "ConditionalGeneration")


def open_backend(config: BackendOptions) -> Backend:
    return TransformersBackend(config)


class TransformersBackend(LocalEngine):
    whole_updates: ClassVar[bool] = False

    def __init__(self, config: BackendOptions) -> None:
        super().__init__(config)
        self._model: Any = None
        self._batch: ContinuousBatch | None = None
        self._constraints: ConstraintFactory | None = None
        self._eos: frozenset[int] = frozenset()
        self._writes = True
        self._embedder: Embedder | None = None
        self._pooling: str | None = None
        self._adapters: dict[str, str] = {}  # peft's names of those that rows may name, by theirs

    async def start(self) -> None:
        await asyncio.to_thread(self._load)

    async def close(self) -> None:
        if self._batch is not None:
            self._batch.stop()
            await asyncio.to_thread(self._batch.join)
            self._batch = self._model = None

    async def generate(self, request: Request) -> Completion:
        if self._batch is None or self._codec is None:
            raise not_started()
        if request.embed is not None:
            return await self._embed(request, request.embed, self._codec)
        if not self._writes:
            message = "the model makes embeddings and writes no text: use rows of /v1/embeddings, or another model"
            raise AttemptError(message, code="bad_request", retry=False)
        prompts, inputs = await self._read(request, self._codec)
        thinking = self._codec.thinking(request, prompts[0])
        if request.on_begin is not None:
            request.on_begin(Begun(len(prompts[0]), thinking))
        alone = object() if request.alone else None
        sequences = [self._sequence(request, prompt, index, alone, inputs) for index, prompt in enumerate(prompts)]
        try:
            self._batch.submit([sequence for sequence, _ in sequences])
            choices = [await future for _, future in sequences]
        finally:
            # Done ones do not mind; the others leave the batch before its next step.
            for sequence, future in sequences:
                sequence.cancelled = True
                if not future.cancel() and not future.cancelled():
                    future.exception()  # looked at: several choices may fail of one cause
        return Completion(choices, len(prompts[0]), thinking=thinking)

    async def _read(self, request: Request, codec: TextCodec) -> tuple[list[list[int]], dict[str, Any]]:
        """Return the prompt of each completion, and further inputs of the model."""
        if not has_images(request):
            return codec.encode_each(request if self._vision is None else self._vision.plain(request)), {}
        if self._vision is None:
            raise no_images(self._config.model)
        ids, given = await asyncio.to_thread(self._vision.encode, request)
        inputs = {
            key: value.to(self._device, self._model.dtype if value.is_floating_point() else None)
            for key, value in given.items()
        }
        return [ids] * request.sampling.n, inputs

    async def _embed(self, request: Request, embed: Embed, codec: TextCodec) -> Completion:
        if self._embedder is None:
            raise not_started()
        pooling = embed.pooling
        if not pooling:
            if self._pooling is None:
                where = self._config.model, self._options.get("revision")
                self._pooling = await asyncio.to_thread(pooling_of, *where, causal=self._writes)
            pooling = self._pooling
        ids = codec.encode(request)
        return Completion([], len(ids), [unit(await self._embedder.vector(ids, pooling), embed.dimensions)])

    async def load_weights(self, files: Mapping[Path, SequenceOf[str]]) -> None:
        if self._batch is None:
            raise not_started()
        from safetensors import SafetensorError

        try:
            await asyncio.to_thread(self._copy, self._batch, files)
        except SafetensorError as error:
            raise AttemptError(f"the weights cannot be read: {error}", code="weights_invalid") from error

    def _copy(self, batch: ContinuousBatch, files: Mapping[Path, SequenceOf[str]]) -> None:
        import torch
        from safetensors import safe_open

        with batch.between_rounds, torch.no_grad():
            state = self._model.state_dict()
            for path, names in files.items():
                with safe_open(path, framework="pt") as file:
                    for name in names:
                        given = file.get_tensor(name)
                        if name not in state or state[name].shape != given.shape:
                            raise other_model(name)
                        state[name].copy_(given)

    def _sequence(
        self, request: Request, prompt: list[int], index: int, alone: object, inputs: dict[str, Any]
    ) -> tuple[Sequence, asyncio.Future[Choice]]:
        if self._codec is None or self._constraints is None:
            raise not_started()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Choice] = loop.create_future()
        sampling = request.sampling
        limit = sampling.limits[index] if sampling.limits else sampling.max_tokens

        def settle(outcome: Choice | BaseException) -> None:
            if future.done():
                return
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        def done(outcome: Choice | BaseException) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, outcome)

        def drawn(delta: Delta) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(say, replace(delta, index=index))

        def say(delta: Delta) -> None:
            if request.on_delta is not None and not future.done():
                request.on_delta(delta)

        for ids, key in (
            (sampling.logit_bias, "logit_bias"),
            (sampling.allowed_ids, "allowed_token_ids"),
            (sampling.stop_ids, "stop_token_ids"),
        ):
            self._codec.check_ids(ids, key)
        structure = sampling.structure
        constraint = None if structure is None else self._constraints.make(*structure)
        sequence = Sequence(
            prompt=prompt,
            sampling=sampling,
            seed=sampling.seeds[index] if sampling.seeds else sampling.seed + index,
            done=done,
            limit=min(limit, self._codec.max_model_len - len(prompt)),
            eos=self._eos.union(sampling.stop_ids),
            constraint=constraint,
            alone=alone,
            adapter=self._adapters.get(request.adapter, ""),
            inputs=inputs,
            so_far=request.so_far,
            drawn=drawn if request.on_delta is not None else None,
        )
        if request.on_delta is not None and request.so_far:
            if inputs or alone is not None:
                raise cannot_continue("it has images" if inputs else "it runs alone")
            sequence.stream = TextStream(self._codec, prompt, sampling)
            request.on_delta(Delta(index, sequence.stream.add(request.so_far), request.so_far, repeated=True))
        return sequence, future

    def _load(self) -> None:
        try:
            import torch
            import transformers
        except ImportError as error:
            raise AttemptError(
                f"the transformers backend cannot be imported: {error}: pip install 'rollout-engine[transformers]'",
                code="backend_missing",
                retry=False,
            ) from error
        self._choose_device()
        dtype = self._options.get("dtype") or "auto"
        newer = tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (4, 56)
        arguments: dict[str, Any] = {
            "dtype" if newer else "torch_dtype": dtype if dtype == "auto" else getattr(torch, dtype),
            "revision": self._options.get("revision"),
            "trust_remote_code": bool(self._options.get("trust_remote_code")),
            **(self._options.get("engine") or {}),
        }
        name = self._config.model
        find_on_hub(name, self._options.get("revision"))
        try:
            given = {key: arguments[key] for key in ("revision", "trust_remote_code")}
            config: Any = transformers.AutoConfig.from_pretrained(name, **given)
            self._writes = writes_text(config)
            sees = self._writes and takes_images(config)
            quantised = "quantization_config" in arguments or hasattr(config, "quantization_config")
            if quantised:  # such weights are made on their device, and some cannot leave it
                arguments["device_map"] = {"": self._device}
            kind: Any = transformers.AutoModelForCausalLM if self._writes else transformers.AutoModel
            if sees:
                kind = transformers.AutoModelForImageTextToText
            model: Any = kind.from_pretrained(name, **arguments)
            model.eval()
            if not quantised:
                model.to(self._device)
            length = model_length(model.config, self._options.get("max_model_len"))
            codec = self._load_codec(length)
            if sees:
                self._load_vision()
            if not self._writes:  # positions of some encoders begin after the padding's
                codec.max_model_len = min(length, int(codec.tokenizer.model_max_length))
        except (OSError, ValueError, RuntimeError, KeyError, TypeError, ImportError) as error:
            raise load_failure(f"the model {name} cannot be loaded", error) from error
        self._eos = eos_ids(model, codec.tokenizer)
        eos = codec.tokenizer.eos_token_id
        first = eos if eos is not None else min(self._eos, default=0)
        self._constraints = ConstraintFactory(codec.tokenizer, len(codec.tokenizer), first)
        base = model.base_model if self._writes else model
        model = self._adapted(model)
        self._model = model
        self._batch = ContinuousBatch(model, codec, self._device, self._concurrency)
        self._batch.start()
        self._embedder = Embedder(base, self._device, self._concurrency, self._batch.between_rounds)

    def _adapted(self, model: Any) -> Any:
        """Return `model` with its adapters. A single one is active for all rows; with several, each row names one."""
        given = self._config.adapters
        if not given:
            return model
        try:
            from peft import PeftModel
        except ImportError as error:
            raise AttemptError(
                f"LoRA adapters need the Python package peft on this worker ({error}): pip install "
                "'rollout-engine[lora]'",
                code="backend_missing",
                retry=False,
            ) from error
        adapted: Any = None
        for at, (name, path) in enumerate(adapter_directories(given).items()):
            try:
                if adapted is None:
                    adapted = PeftModel.from_pretrained(model, path, adapter_name="0")
                else:
                    adapted.load_adapter(path, adapter_name=str(at))
            except (OSError, ValueError, RuntimeError, KeyError, TypeError, ImportError) as error:
                raise load_failure(f"the adapter {given[name]} cannot be loaded", error) from error
            self._adapters[name] = str(at)
        if list(given) == [""]:
            self._adapters = {}
        else:
            self._adapters.setdefault("", "__base__")
        return adapted.eval()


def writes_text(config: Any) -> bool:
    """Return whether the model generates text, by the class in its config; without one it is assumed to."""
    classes = [*(getattr(config, "architectures", None) or ()), *(getattr(config, "auto_map", None) or ())]
    return not classes or any(part in found for found in classes for part in _WRITERS)


def takes_images(config: Any) -> bool:
    """Return whether the class in the model's config reads images and text, with one position per token."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as KNOWN

    known: Any = KNOWN.get(config.model_type)
    classes = [known] if isinstance(known, str) else list(known or ())
    if not set(classes).intersection(getattr(config, "architectures", None) or ()):
        return False
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return "mrope_section" not in rope  # such models count positions in three dimensions


def model_length(config: Any, wanted: int | None) -> int:
    """Return the maximum tokens of prompt and completion together. Raises AttemptError if more are wanted than the
    model supports."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    limit = int(getattr(text, "max_position_embeddings", 0) or 0)
    if wanted and limit and wanted > limit:
        raise AttemptError(
            f"backend.max_model_len is {wanted} but the model holds {limit} tokens: lower it",
            code="model_load_failed",
            retry=False,
        )
    return wanted or limit or 1 << 20


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = set(found if isinstance(found, list) else [found])
    return frozenset(int(i) for i in {*ids, tokenizer.eos_token_id} if i is not None)
