"""LoRA adapters of a model, as directories on this host."""

# Where no engine is installed its libraries are absent, and their types are incomplete.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rollout.model.errors import AttemptError
from rollout.workloads.local_model import ADAPTER_FILE

from rollout_worker.backends.loading import load_failure


def adapter_directories(adapters: Mapping[str, str]) -> dict[str, str]:
    """Return a directory for each adapter, downloading those that are Hugging Face names. Raises AttemptError.
    Blocking."""
    return {name: _directory(place) for name, place in adapters.items()}


def _directory(place: str) -> str:
    if Path(place).is_dir():
        return place
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(place)
    except Exception as error:  # the HTTP library beneath, and with it its errors, differs by version
        raise load_failure(f"the adapter {place} is not on this worker and cannot be downloaded", error) from error


def highest_rank(directories: Iterable[str]) -> int:
    """Return the highest rank of the adapters' matrices. Raises AttemptError if one is not a LoRA adapter."""
    highest = 1
    for directory in directories:
        try:
            config: dict[str, Any] = json.loads((Path(directory) / ADAPTER_FILE).read_text("utf-8"))
            ranks: dict[str, int] = config.get("rank_pattern") or {}
            highest = max(highest, int(config["r"]), *ranks.values())
        except (OSError, ValueError, KeyError, TypeError) as error:
            message = f"the adapter {directory} is no LoRA adapter: its {ADAPTER_FILE} has no rank `r` ({error!r})"
            raise AttemptError(message, code="model_load_failed", retry=False) from error
    return highest
