"""The state of training between two steps, as files and back: weights, optimiser, schedule, randomness, position.

It uses only safetensors and JSON, in an order that depends on names alone, so equal states have equal bytes.
"""

from __future__ import annotations

import json
import random
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import safetensors.torch
import torch
from blake3 import blake3
from rollout.model.errors import ObjectCorruptError
from rollout.snapshots.export import PROBE
from safetensors import SafetensorError
from torch import Tensor

from rollout_worker.backends.training.probe import TENSORS, Probe

MANIFEST, WEIGHTS, OPTIMIZER = "manifest.json", "model.safetensors", "optimizer.safetensors"
CRITIC = "critic.safetensors"
"""File of a value model that is trained with the policy."""


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, sort_keys=True, indent=1) + "\n", "utf-8")


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises ObjectCorruptError if it is missing or invalid."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ObjectCorruptError(f"the snapshot's {path.name} cannot be read: {error}") from error


@dataclass(slots=True)
class Captured:
    """A copy of the state on the CPU: training may continue while it is written."""

    manifest: dict[str, Any]
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    optimizer_rest: dict[str, Any]
    schedule: dict[str, Any]
    randoms: list[Random]
    model_files: dict[str, bytes]
    """Files of `model/` that loading needs besides the weights: configuration, tokenizer and templates."""
    probe: Probe
    critic: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def digest(self) -> str:
        """Return blake3 over the weights, ordered by name: names, shapes, types and bytes."""
        hasher = blake3()
        for name, tensor in sorted(self.weights.items()):
            hasher.update(f"{name}\0{tuple(tensor.shape)}\0{tensor.dtype}\0".encode())
            hasher.update(tensor.view(torch.uint8).numpy().tobytes() if tensor.ndim else tensor.numpy().tobytes())
        return hasher.hexdigest()


@dataclass(slots=True)
class Random:
    """The random generators of a rank: torch's, on the CPU and the device, numpy's and Python's."""

    tensors: dict[str, Tensor]
    rest: dict[str, Any]


def write(captured: Captured, directory: Path) -> None:
    """Write the state to the new directory `directory`. Raises OSError."""
    directory.mkdir(parents=True)
    _save(captured.weights, directory / WEIGHTS, {"format": "pt"})
    if captured.critic:
        _save(captured.critic, directory / CRITIC)
    _save(captured.optimizer, directory / OPTIMIZER)
    write_json(directory / "optimizer.json", captured.optimizer_rest)
    write_json(directory / "schedule.json", captured.schedule)
    for rank, random_state in enumerate(captured.randoms):
        _save(random_state.tensors, directory / f"random-{rank:05}.safetensors")
        write_json(directory / f"random-{rank:05}.json", random_state.rest)
    _save(captured.probe.tensors, directory / TENSORS)
    write_json(directory / PROBE, captured.probe.about)
    (directory / "model").mkdir()
    for name, data in captured.model_files.items():
        (directory / "model" / name).write_bytes(data)
    write_json(directory / MANIFEST, captured.manifest)


def load_weights(directory: Path) -> dict[str, Tensor]:
    return _load(directory / WEIGHTS)


def load_critic(directory: Path) -> dict[str, Tensor]:
    return _load(directory / CRITIC)


def capture_optimizer(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split `state_dict()` of a torch optimiser into (tensors, the rest)."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for index, values in state["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = plain(value)
            else:
                numbers[f"{index}.{key}"] = value
    return tensors, {"groups": deepcopy(state["param_groups"]), "numbers": numbers}


def load_optimizer(directory: Path) -> dict[str, Any]:
    more = read_json(directory / "optimizer.json")
    state: dict[int, dict[str, Any]] = {}
    found: dict[str, Any] = {**_load(directory / OPTIMIZER), **more["numbers"]}
    for name, value in found.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    groups = [{**group, "betas": tuple(group["betas"])} if "betas" in group else group for group in more["groups"]]
    return {"state": state, "param_groups": groups}


def capture_random() -> Random:
    numpy_state = cast(tuple[str, Any, int, int, float], np.random.get_state(legacy=True))
    version, internal, gauss = random.getstate()
    tensors = {"torch": torch.get_rng_state(), "numpy": torch.tensor(numpy_state[1].tolist(), dtype=torch.int64)}
    tensors["python"] = torch.tensor(internal, dtype=torch.int64)
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return Random(tensors, {"numpy": [numpy_state[0], *numpy_state[2:]], "python": [version, gauss]})


def load_random(directory: Path, rank: int) -> None:
    tensors, rest = _load(directory / f"random-{rank:05}.safetensors"), read_json(directory / f"random-{rank:05}.json")
    torch.set_rng_state(tensors["torch"])
    name, position, has_gauss, cached = rest["numpy"]
    np.random.set_state((name, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    version, gauss = rest["python"]
    internal: Any = tensors["python"]
    random.setstate((version, tuple(internal.tolist()), gauss))
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])


def seed_everything(seed: int, rank: int) -> None:
    """Seed all generators: dropout differs between ranks. Weights are the same on all, because they are made before,
    with rank 0."""
    mixed = (seed * 1_000_003 + rank) % (1 << 63)
    random.seed(mixed)
    np.random.seed(mixed % (1 << 32))
    library: Any = torch
    library.manual_seed(mixed)


def plain(tensor: Tensor) -> Tensor:
    """Return a contiguous copy on the CPU."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    library: Any = safetensors.torch
    library.save_file({name: tensors[name] for name in sorted(tensors)}, path, metadata=metadata)


def _load(path: Path) -> dict[str, Tensor]:
    library: Any = safetensors.torch
    try:
        return library.load_file(path)
    except (OSError, SafetensorError) as error:
        raise ObjectCorruptError(f"the snapshot's {path.name} cannot be read: {error}") from error
