"""Sampling defaults that a model's generation_config.json suggests, as vLLM's server applies them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import structlog
from rollout.workloads.json_form import JsonObject
from rollout.workloads.local_model import LocalModel, cached_directory, hub_commit

_log = structlog.get_logger()
FILE = "generation_config.json"
_KEYS = {
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
"""Keys on vLLM's list (ModelConfig.get_diff_sampling_param), with our names."""
_WITH_FILES = frozenset({"transformers", "vllm"})


async def suggested_sampling(kind: str, model: str, revision: str | None) -> JsonObject:
    """Return the suggested sampling keys. `model` is that of BackendOptions, after it has been loaded."""
    return await asyncio.to_thread(_read, model, revision) if kind in _WITH_FILES else {}


def _read(model: str, revision: str | None) -> JsonObject:
    directory = Path(model) if Path(model).is_dir() else _cached(model, revision)
    if directory is None:
        return {}
    try:
        given: Any = json.loads((directory / FILE).read_text("utf-8"))
        return {ours: given[theirs] for theirs, ours in _KEYS.items() if given.get(theirs) is not None}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        _log.warning("generation_config_unread", path=str(directory / FILE), error=str(error))
        return {}


def _cached(name: str, revision: str | None) -> Path | None:
    return cached_directory(LocalModel(name, "", commit=hub_commit(name, revision)))
