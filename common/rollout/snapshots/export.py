"""A snapshot of a training run as a directory that transformers and vLLM load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from rollout.model.errors import InputError, ObjectCorruptError

WEIGHTS = "model.safetensors"
ADAPTER = "adapter_config.json"


def export_model(state: Path, directory: Path) -> None:
    """From the unpacked snapshot `state` into the new directory `directory`. Blocking. ObjectCorruptError, OSError.

    Of a run that trained an adapter it is the adapter, as peft reads it. Of a reward model it is a model for sequence
    classification with one label.
    """
    files = state / "model"
    if not (state / WEIGHTS).is_file() or not (files / "config.json").is_file():
        raise ObjectCorruptError(f"{state} is no snapshot of a model: it lacks {WEIGHTS} or model/config.json")
    directory.mkdir(parents=True)
    for path in sorted(files.iterdir()):
        shutil.copyfile(path, directory / path.name)
    if (files / ADAPTER).is_file():
        shutil.copyfile(state / WEIGHTS, directory / "adapter_model.safetensors")
        return
    shutil.copyfile(state / WEIGHTS, directory / WEIGHTS)
    manifest: dict[str, Any] = json.loads((state / "manifest.json").read_text("utf-8"))
    if manifest.get("algorithm") == "rm":
        _as_classifier(directory / "config.json")


def _as_classifier(path: Path) -> None:
    config: dict[str, Any] = json.loads(path.read_text("utf-8"))
    names = [
        str(name).replace("ForCausalLM", "ForSequenceClassification") for name in config.get("architectures") or []
    ]
    config |= {"architectures": names, "num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    path.write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def is_adapter(directory: Path) -> bool:
    return (directory / ADAPTER).is_file()


def base_of(directory: Path) -> str:
    """The model that an exported adapter belongs to. InputError: it is none."""
    try:
        return str(json.loads((directory / ADAPTER).read_text("utf-8"))["base_model_name_or_path"])
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{directory} holds no adapter: {error}") from error
