"""Earlier versions of a policy as the engines had them, which samples of a step may have."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from rollout.model.errors import AttemptError
from safetensors import safe_open
from torch import Tensor

from rollout_worker.backends.training.parallel import share_of
from rollout_worker.backends.training.weights import names


class Versions:
    """The newest `count` versions. `dtype` is that of published weights."""

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self.count = count
        self._dtype = dtype
        self._tensors: dict[int, dict[str, Tensor]] = {}
        self._files: dict[int, Mapping[str, str]] = {}

    def begin(self, files: Mapping[int, Mapping[str, str]]) -> None:
        """Begin a segment. `files` has, for each version from before, the safetensors file of each tensor."""
        self._files = dict(files)

    def keep(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        if self.count:
            self._tensors[version] = {name: tensor.to(self._dtype) for name, tensor in tensors.items()}
            for old in [one for one in self._tensors if one < version - self.count]:
                del self._tensors[old]

    def _found(self, version: int) -> Mapping[str, Tensor]:
        if version not in self._tensors:
            if version not in self._files:
                raise AttemptError(f"version {version} of the policy is not here any more", code="version_missing")
            self._tensors[version] = _loaded(self._files[version])
        return self._tensors[version]

    @contextmanager
    def standing(self, policy: Any, version: int) -> Generator[None]:
        """Set the policy to `version` inside the block."""
        tensors, places = self._found(version), published_places(policy)
        with ExitStack() as stack, torch.no_grad():
            if hasattr(policy, "peft_config"):
                stack.enter_context(policy.disable_adapter())  # what was published has it merged in
            saved = {name: places[name].detach().clone() for name in tensors}
            try:
                for name, tensor in tensors.items():
                    places[name].copy_(share_of(tensor.to(places[name].dtype), places[name]))
                yield
            finally:
                for name, tensor in saved.items():
                    places[name].copy_(tensor)


def published_places(policy: Any) -> dict[str, Any]:
    """Return parameters by the name under which their tensor is published."""
    parameters: dict[str, Any] = dict(policy.named_parameters(remove_duplicate=False))
    if not hasattr(policy, "peft_config"):
        return {file_name: parameters[name] for name, file_name in names(policy).items() if name in parameters}
    return {
        f"{name}.weight": module.get_base_layer().weight
        for name, module in policy.get_base_model().named_modules()
        if hasattr(module, "get_base_layer")
    }


def _loaded(files: Mapping[str, str]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(set(files.values())):
        opened: Any = safe_open(Path(path), framework="pt")
        with opened as file:
            found |= {name: file.get_tensor(name) for name, place in files.items() if place == path}
    return found
