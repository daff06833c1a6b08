"""Publishes a version of the policy for the engines that generate samples: the tensors that training changes, as files.

An engine needs no support for adapters: published are weights of the base model with the adapter merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from blake3 import blake3
from rollout.model.errors import AttemptError
from torch import Tensor, nn

from rollout_worker.backends.training.models import is_tied
from rollout_worker.backends.training.parallel import whole
from rollout_worker.backends.training.state import plain
from rollout_worker.backends.training.weights import names


@dataclass(frozen=True, slots=True)
class Publication:
    """`hashes` are blake3 in hex of the bytes of each tensor. `written` are those in the file, sorted; the others are
    where the previous version has them. If none is written, there is no file."""

    hashes: dict[str, str]
    written: list[str]


def publish(tensors: Mapping[str, Tensor], before: Mapping[str, str], path: Path, dtype: torch.dtype) -> Publication:
    """Write those of `tensors`, on the CPU, that differ from the version `before` (name -> hash) to `path`, a
    safetensors file in `dtype`. Equal input gives equal bytes. Raises OSError."""
    hashes: dict[str, str] = {}
    changed: dict[str, Tensor] = {}
    for name in sorted(tensors):
        tensor = tensors[name].detach().to(dtype).contiguous()
        data: Any = tensor.reshape(-1).view(torch.uint8).numpy()
        hashes[name] = blake3(data, max_threads=blake3.AUTO).hexdigest()
        if hashes[name] != before.get(name):
            changed[name] = tensor
    if changed:
        library: Any = safetensors.torch
        library.save_file(changed, path, metadata={"format": "pt"})
        path.chmod(0o644)
    return Publication(hashes, sorted(changed))


def published_tensors(model: nn.Module, *, keep: bool = True) -> dict[str, Tensor]:
    """Return the tensors that training changes, on the CPU, under the names of the model's files; for a model with an
    adapter, `merged_tensors`. All processes call it at once; those that do not `keep` them get nothing."""
    if hasattr(model, "peft_config"):
        return merged_tensors(model, keep=keep)
    trained = {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    state = model.state_dict()
    found: dict[str, Tensor] = {}
    for name, file_name in names(model).items():
        if name in trained:
            value = whole(state[name])
            if keep:
                found[file_name] = plain(value)
    return found


@torch.no_grad()
def merged_tensors(model: Any, *, keep: bool = True) -> dict[str, Tensor]:
    """Return weights of the layers that have an adapter, with the adapter merged; the model does not change.

    Raises AttemptError if the adapter is on embeddings tied to the output layer, for which an engine has one tensor.
    """
    from peft.tuners.lora import LoraLayer

    base = model.get_base_model()
    ends: list[Any] = [base.get_input_embeddings(), base.get_output_embeddings()]
    tied = is_tied(base)
    found: dict[str, Tensor] = {}
    for name, module in base.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        if tied and any(module is end for end in ends):
            message = "lora.target_modules: the embeddings of this model are its output layer: leave both out"
            raise AttemptError(message, code="bad_run_config", retry=False)
        layer: Any = module
        weight = whole(layer.get_base_layer().weight)
        merged = weight + whole(layer.get_delta_weight("default")).to(weight.dtype)
        if keep:
            found[f"{name}.weight"] = plain(merged)
    return found
