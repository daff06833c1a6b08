"""Makes results bit-for-bit reproducible: what to set, before which import, and what a result then depends on.

It is strict, never warn-only: an operation without a deterministic implementation is an error. (The backward pass of
some attention kernels is deterministic in strict mode only: pytorch PR 182551.)
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rollout.model.errors import StateError

ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "PYTHONHASHSEED": "0",
    "MKL_DYNAMIC": "FALSE",  # it would lower the number of threads by itself, on which sums depend
    "TOKENIZERS_PARALLELISM": "false",
    "NCCL_ALGO": "Ring",
    "FLASH_ATTENTION_DETERMINISTIC": "1",  # its backward pass is not, by itself
}
"""Variables that libraries read at import: they are set before the process starts."""

_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""Silences output of libraries that would hide problems in the worker's log."""

_PACKAGES = ("torch", "transformers", "accelerate", "peft")


def environment(threads: int) -> dict[str, str]:
    """Return variables for a training process."""
    return _needed(threads) | _QUIET


def _needed(threads: int) -> dict[str, str]:
    count = str(threads)
    return ENVIRONMENT | {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}


def make_deterministic(threads: int) -> None:
    """Call this once per process, before a model is built: modules copy flags when they are made. Raises StateError if
    it is too late."""
    wrong = [name for name, value in _needed(threads).items() if os.environ.get(name) != value]
    if wrong:
        raise StateError(f"{', '.join(wrong)} must be set before a process that trains is started")
    import torch

    torch.use_deterministic_algorithms(True, warn_only=False)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(threads)


def fingerprint(
    device: str, *, precision: str, threads: int, world: int, strategy: str, attention: str, compiled: bool
) -> dict[str, Any]:
    """Return the fingerprint: where it is equal, the same input gives the same bytes."""
    import torch

    found: dict[str, Any] = {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "versions": {name: _version(name) for name in _PACKAGES},
        "dtype": precision,
        "world_size": world,
        "strategy": strategy,
        "attention": attention,
        "optimizer": "fused",
        "compile": compiled,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        found["device"] = f"{torch.cuda.get_device_name()} sm_{major}{minor}"
        found["cuda"], found["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
    else:
        found["device"] = f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        found["threads"] = threads
    return found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
