"""Variables that an engine reads at import, decided before its process starts and without importing it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rollout.compute.local import nvidia_gpus


def gpu_present() -> bool:
    """Return whether an NVIDIA driver is loaded. Use it for variables only: the engine asks
    torch.cuda.is_available()."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()


def engine_environment(backend: dict[str, Any], *, local_model: bool) -> dict[str, str]:
    """Return variables for the child process of `backend` (the [backend] table), except those already set."""
    wanted = {"TOKENIZERS_PARALLELISM": "false"}
    if local_model:
        wanted["HF_HUB_OFFLINE"] = "1"
    cpu = backend.get("device") == "cpu" or (backend.get("device") is None and not gpu_present())
    if cpu and backend.get("kind") in ("transformers", "vllm"):
        # More threads than this make small models several times slower; operators of large CPU hosts set their own.
        wanted["OMP_NUM_THREADS"] = "1"
    if backend.get("kind") == "vllm":
        wanted.update(_vllm(backend, cpu=cpu))
    return {name: value for name, value in wanted.items() if name not in os.environ}


def engine_devices(backend: dict[str, Any]) -> int:
    """Return how many accelerators the engine spreads a model over; a registered backend uses vLLM's options."""
    engine: dict[str, Any] = backend.get("engine") or {}
    stages = engine.get("pipeline_parallel_size", 1)
    if backend.get("device") == "cpu" or backend.get("kind") in ("mock", "openai"):
        return 0
    if backend.get("kind") == "transformers":
        return 1
    return int(backend.get("tensor_parallel_size") or 1) * (stages if isinstance(stages, int) else 1)


def _vllm(backend: dict[str, Any], *, cpu: bool) -> dict[str, str]:
    wanted = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CONFIGURE_LOGGING": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if not cpu:
        # torch was asked whether there is a GPU, and a process that has touched CUDA must not be forked.
        wanted["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if cpu:
        wanted["VLLM_CPU_KVCACHE_SPACE"] = str(backend.get("cpu_kvcache_gib") or 1)
        # The engine child is the engine's process already: a second one only costs start-up time.
        wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if backend.get("enforce_eager") is not False:
            # Some of vLLM's kernels compile on first use whatever enforce_eager says: 20 s for the first logprob.
            wanted["TORCHDYNAMO_DISABLE"] = "1"
    return wanted


def number_devices() -> None:
    """Convert CUDA_VISIBLE_DEVICES to numbers in this process: vLLM up to 0.23 fails with ValueError for a UUID.

    https://github.com/vllm-project/vllm/pull/46132. Call it before CUDA is initialised.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if not any(entry.startswith("GPU-") for entry in listed):
        return
    numbers = {gpu.uuid: str(gpu.index) for gpu in nvidia_gpus()}
    if all(entry in numbers for entry in listed):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(numbers[entry] for entry in listed)
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # that of NVML's numbers; CUDA's own puts the fastest first
