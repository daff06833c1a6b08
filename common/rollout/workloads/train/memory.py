"""Counts a model's parameters and estimates the memory that training takes, from the model's files alone."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from rollout.model.errors import InputError
from rollout.workloads.json_form import JsonObject
from rollout.workloads.train.base_config import LoraSection, OptimizerSection
from rollout.workloads.train.config import Kind, SftSection, TrainingSection
from rollout.workloads.train.policy_config import GenerationSection, PolicySection, PpoSection

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of the weights by their names in the model's files."""

_HEADER_MAX = 100 << 20
_FP32, _BF16 = 4, 2


@dataclass(frozen=True, slots=True)
class Memory:
    """Peak bytes on each device during a step. `host` is memory besides it, for the copy from which a snapshot is
    written. `generation` is the weights and KV cache of an engine that takes turns with training.

    `parameters` counts all parameters, `trained` those that an optimiser changes.
    """

    parameters: int
    trained: int
    weights: int
    gradients: int
    optimizer: int
    reference: int
    activations: int
    host: int
    generation: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.reference + max(self.activations, self.generation)

    def to_json(self) -> JsonObject:
        return {**asdict(self), "total": self.total}


def read_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Read shapes from the headers of the directory's safetensors files; empty if there are none. Blocking.

    Raises InputError if a file is damaged. The format: 8 bytes with the header's length, little endian, then JSON.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    else:
        names = sorted(
            path.name for path in directory.glob("*.safetensors") if path.name != "adapter_model.safetensors"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        for tensor, entry in _header(directory / name).items():
            if tensor != "__metadata__":
                shapes[tensor] = tuple(entry["shape"])
    return shapes


def _header(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _HEADER_MAX:
                raise ValueError(f"a header of {length} bytes")
            return json.loads(file.read(length))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is no safetensors file: {error}") from error


def count(kind: Kind, settings: TrainingSection, shapes: Shapes, config: JsonObject) -> tuple[int, int]:
    """Return (all parameters, trained parameters) of what is trained, including an adapter or a scoring head."""
    kept = {name: shape for name, shape in shapes.items() if kind != "rm" or not name.startswith("lm_head.")}
    whole = sum(prod(shape) for shape in kept.values())
    head = int(_decoder(config).get("hidden_size", 0)) if kind in ("rm", "ppo") else 0
    if isinstance(settings, PpoSection) and settings.value == "model":
        head += sum(prod(shape) for name, shape in shapes.items() if not name.startswith("lm_head."))
    if settings.lora is None:
        return whole + head, whole + head
    adapter = sum(
        _adapter(shape, settings.lora) for name, shape in kept.items() if _adapted(name, shape, settings.lora)
    )
    # The head is trained whole; the frozen copy that peft keeps of it counts, too.
    return whole + 2 * head + adapter, head + adapter


def _adapter(shape: tuple[int, ...], lora: LoraSection) -> int:
    """Return the parameters of two matrices, (r, in) and (out, r) (Hu et al. 2021, arXiv 2106.09685)."""
    return lora.r * (shape[0] + shape[1])


def _adapted(name: str, shape: tuple[int, ...], lora: LoraSection) -> bool:
    if len(shape) != 2 or not name.endswith(".weight"):
        return False
    module = name.removesuffix(".weight")
    if isinstance(lora.target_modules, list):
        return any(module == target or module.endswith(f".{target}") for target in lora.target_modules)
    if lora.target_modules == "all-linear":  # but for the output layer, as peft has it
        return ".layers." in f".{module}" or ".h." in f".{module}"
    return re.fullmatch(lora.target_modules, module) is not None


def unadapted(lora: LoraSection, shapes: Shapes, config: JsonObject) -> str:
    """Return a fault if `target_modules` names layers that the model does not have, else ""."""
    targets = lora.target_modules
    if targets == "all-linear" or not shapes:
        return ""
    layers = [name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2]
    names = sorted({layer.rpartition(".")[2] for layer in layers if _DECODER.search(layer)})
    if isinstance(targets, list):
        last = {layer.rpartition(".")[2] for layer in layers} | {"lm_head"}  # which may share the embedding's weight
        if any(target.rpartition(".")[2] in last for target in targets):
            return ""
        return f"the model has no layer {' or '.join(map(repr, targets))}: its layers are {', '.join(names)}"
    try:
        pattern = re.compile(targets)
    except re.error as error:
        return f"{targets!r} is no regular expression ({error}): a list names layers by the end of their names"
    # Files of some models lack what their classes put before all names; of several towers, classes rename more.
    if "text_config" in config or any(
        pattern.fullmatch(f"{b}{a}") for a in layers for b in ("", "model.", "transformer.")
    ):
        return ""
    return (
        f"no name of a layer is all matched by the regular expression {targets!r}, as {layers[-1]!r} would be: a list "
        f"names layers by the end of their names, such as {names[:1] or layers[-1:]}"
    )


_DECODER = re.compile(r"(^|\.)(layers|h)\.")


def estimate(
    kind: Kind,
    settings: TrainingSection,
    shapes: Shapes,
    config: JsonObject,
    generation: GenerationSection | None = None,
) -> Memory:
    """Estimate the memory for a model with these weights and this config.json. `generation` describes an engine on the
    same devices.

    Weights, gradients and optimiser are exact. Activations follow the usual formula, and libraries take some more:
    treat the total as a rule of thumb.

    Activations of a layer: Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1), 34 s b h bytes in half precision
    plus 5 a s^2 b where the attention matrix is kept (eager).
    """
    parameters, trained = count(kind, settings, shapes, config)
    casts = parameters * _BF16 if settings.precision == "bf16" else 0  # autocast keeps them for the whole forward pass
    shares = settings.devices if settings.strategy == "fsdp" else 1
    copied = trained * (_FP32 + _state(settings.optimizer))
    return Memory(
        parameters=parameters,
        trained=trained,
        weights=(parameters * _FP32 + casts) // shares,
        gradients=trained * _FP32 // shares,
        optimizer=trained * _state(settings.optimizer) // shares,
        reference=parameters * _FP32 // shares if _has_reference(settings) else 0,
        activations=_activations(kind, settings, config),
        host=copied,
        generation=_generation(settings, generation, parameters, config),
    )


def _generation(
    settings: TrainingSection, generation: GenerationSection | None, parameters: int, config: JsonObject
) -> int:
    """Return the bytes of the weights, and of the KV cache for the longest samples of all groups at once."""
    if not isinstance(settings, PolicySection) or generation is None or generation.placement == "separate":
        return 0
    used = generation.resolved(settings)
    size = _BF16 if used.dtype == "bfloat16" else _FP32
    decoder = _decoder(config)
    hidden, heads = int(decoder.get("hidden_size", 0)), int(decoder.get("num_attention_heads", 0)) or 1
    width = int(decoder.get("num_key_value_heads") or heads) * int(decoder.get("head_dim") or hidden // heads)
    tokens = (used.groups_at_once or 1) * settings.num_generations * settings.max_length
    return size * (parameters + 2 * int(decoder.get("num_hidden_layers", 0)) * width * tokens)


def _state(optimizer: OptimizerSection) -> int:
    """Return the optimiser's bytes per parameter: two moments, or the momentum."""
    if optimizer.kind == "sgd":
        return _FP32 if optimizer.momentum else 0
    return 2 * _FP32


def _has_reference(settings: TrainingSection) -> bool:
    """Return whether the reference is a model of its own; with an adapter, it is the policy without the adapter."""
    if settings.compared == "free":
        return False
    return settings.compared != "base" or settings.lora is None


def _activations(kind: Kind, settings: TrainingSection, config: JsonObject) -> int:
    decoder = _decoder(config)
    hidden, layers = int(decoder.get("hidden_size", 0)), int(decoder.get("num_hidden_layers", 0))
    heads, vocabulary = int(decoder.get("num_attention_heads", 0)), int(decoder.get("vocab_size", 0))
    length = settings.length if isinstance(settings, SftSection) else settings.max_length
    sequences = settings.minibatch_size * (2 if kind in ("rm", "dpo", "ipo") else 1)
    tokens = sequences * length
    size = _BF16 if settings.precision == "bf16" else _FP32
    layer = 17 * size * tokens * hidden
    if settings.attention == "eager":
        layer += 5 * size // 2 * heads * length * tokens
    stack = layers * size * tokens * hidden + layer if settings.gradient_checkpointing else layers * layer
    # Logits, their copy in float32 and its gradient.
    logits = 0 if kind == "rm" else tokens * vocabulary * (size + 2 * _FP32)
    return stack + logits


def _decoder(config: JsonObject) -> JsonObject:
    """Return the decoder's part of a config.json that also describes other towers."""
    return config.get("text_config") or config


def flops_per_token(
    kind: Kind, settings: TrainingSection, parameters: int, trained: int, config: JsonObject, length: float
) -> float:
    """Return FLOPs per token of training on sequences of `length` tokens (Chowdhery et al. 2022, arXiv 2204.02311,
    appendix B): 2 per parameter forward and 2 backward, 2 more for each with a gradient, and 12 (layers) (hidden)
    (length) of attention.

    A reference adds a forward pass; KTO compares with one more of both. Recomputation does not count.
    """
    decoder = _decoder(config)
    embedded = int(decoder.get("vocab_size", 0)) * int(decoder.get("hidden_size", 0))
    tied = bool(decoder.get("tie_word_embeddings"))
    used = parameters - (0 if tied else embedded)  # looking up an embedding is no product
    attention = 4 * int(decoder.get("num_hidden_layers", 0)) * int(decoder.get("hidden_size", 0)) * length
    forward = 2.0 * used + attention
    passes = 0 if settings.compared == "free" else 1
    if kind == "kto":
        passes += 1 + passes
    return 2 * forward + (2.0 * min(trained, used) + attention) + passes * forward
