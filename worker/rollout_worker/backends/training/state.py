"""What training stands on between two steps, as files, and back: weights, optimiser, schedule, random numbers, position.

Only safetensors and JSON, in an order that depends on nothing but names, so that equal states are equal bytes.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from rollout.model.errors import ObjectCorruptError
from safetensors.torch import load_file, save_file
from torch import Tensor

MANIFEST, WEIGHTS, OPTIMIZER = "manifest.json", "model.safetensors", "optimizer.safetensors"


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, sort_keys=True, indent=1) + "\n", "utf-8")


def read_json(path: Path) -> Any:
    """ObjectCorruptError: it is not there, or no JSON."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ObjectCorruptError(f"the snapshot's {path.name} cannot be read: {error}") from error


def save_weights(directory: Path, weights: dict[str, Tensor]) -> None:
    save_file({name: _plain(weights[name]) for name in sorted(weights)}, directory / WEIGHTS, metadata={"format": "pt"})


def load_weights(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / WEIGHTS)


def save_optimizer(directory: Path, state: dict[str, Any]) -> None:
    """`state_dict()` of a torch optimiser."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for index, values in state["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = _plain(value)
            else:
                numbers[f"{index}.{key}"] = value
    save_file({name: tensors[name] for name in sorted(tensors)}, directory / OPTIMIZER)
    write_json(directory / "optimizer.json", {"groups": state["param_groups"], "numbers": numbers})


def load_optimizer(directory: Path) -> dict[str, Any]:
    more = read_json(directory / "optimizer.json")
    state: dict[int, dict[str, Any]] = {}
    found: dict[str, Any] = {**load_file(directory / OPTIMIZER), **more["numbers"]}
    for name, value in found.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    groups = [{**group, "betas": tuple(group["betas"])} if "betas" in group else group for group in more["groups"]]
    return {"state": state, "param_groups": groups}


def save_random(directory: Path, rank: int) -> None:
    """The generators of this process: torch's, on the CPU and the device, numpy's and Python's."""
    numpy_state = cast(tuple[str, Any, int, int, float], np.random.get_state(legacy=True))
    version, internal, gauss = random.getstate()
    tensors = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(np.asarray(numpy_state[1], np.int64).copy())}
    tensors["python"] = torch.tensor(internal, dtype=torch.int64)
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    save_file({name: tensors[name] for name in sorted(tensors)}, directory / f"random-{rank:05}.safetensors")
    rest = {"numpy": [numpy_state[0], *numpy_state[2:]], "python": [version, gauss]}
    write_json(directory / f"random-{rank:05}.json", rest)


def load_random(directory: Path, rank: int) -> None:
    tensors, rest = load_file(directory / f"random-{rank:05}.safetensors"), read_json(directory / f"random-{rank:05}.json")
    torch.set_rng_state(tensors["torch"])
    name, position, has_gauss, cached = rest["numpy"]
    np.random.set_state((name, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    version, gauss = rest["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss))
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])


def seed_everything(seed: int, rank: int) -> None:
    """Different dropout on each rank, the same weights on all: those are made before, with rank 0."""
    mixed = (seed * 1_000_003 + rank) % (1 << 63)
    random.seed(mixed)
    np.random.seed(mixed % (1 << 32))
    torch.manual_seed(mixed)


def _plain(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, with memory of its own."""
    return tensor.detach().to("cpu", copy=True).contiguous()
