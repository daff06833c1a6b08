"""Exports a snapshot of a training run as a directory that transformers, peft and vLLM load."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollout.model.errors import ConfigError, ObjectCorruptError
from rollout.processes.command import run
from rollout.processes.interpreter import python_module
from rollout.snapshots.parts import read_manifest

WEIGHTS = "model.safetensors"
ADAPTER = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_OF_WHOLE_MODELS = ("config.json", "generation_config.json")
"""Files that, next to an adapter, would hide it from transformers, which would then look for weights."""
PROBE = "probe.json"
"""File in a snapshot with the trainer's outputs for a few rows."""
_MERGE = "rollout_worker.backends.training.merge"
_CHECK = "rollout_worker.backends.training.probe"
_PREFIXES = {
    "bloom": "transformer", "codegen": "transformer", "falcon": "transformer", "gpt2": "transformer",
    "gpt_bigcode": "transformer", "gpt_neo": "transformer", "gpt_neox": "gpt_neox", "gptj": "transformer",
    "mpt": "transformer",
}  # fmt: skip
"""The prefix of the backbone in a transformers model with a head, by `model_type`, if it is not `model`."""

_NO_REASON = "no reason given"


def export_model(state: Path, directory: Path, *, base: str = "", merged: bool = False) -> None:
    """Export the unpacked snapshot `state` to the new directory `directory`. Blocking.

    If the run trained an adapter, it is written as peft reads it, with `base`, a directory or a Hugging Face name, or
    with `merged` as a whole model. A reward model becomes a sequence classifier with one label.

    Raises ObjectCorruptError, ConfigError if the base cannot be loaded or there is nothing to merge, or OSError.
    """
    manifest = read_manifest(state, "train_state")
    files = state / "model"
    if not (state / WEIGHTS).is_file() or not (files / "config.json").is_file():
        raise ObjectCorruptError(f"{state} is no snapshot of a model: it lacks {WEIGHTS} or model/config.json")
    is_adapter = (files / ADAPTER).is_file()
    if merged and not is_adapter:
        raise ConfigError("--merged: this snapshot holds a whole model, no adapter: leave the option away")
    if merged and manifest["algorithm"] == "rm":
        raise ConfigError("--merged: of a reward model only the adapter is written: leave the option away")
    adapter = state / "adapter" if merged else directory
    adapter.mkdir(parents=True)
    for path in sorted(files.iterdir()):
        if not (is_adapter and path.name in _OF_WHOLE_MODELS):
            shutil.copyfile(path, adapter / path.name)
    if is_adapter:
        _write_adapter(state / WEIGHTS, adapter, base, "SEQ_CLS" if manifest["algorithm"] == "rm" else "CAUSAL_LM")
        if merged:
            _merge(adapter, base, directory)
            _keep_ids(files, directory)
        return
    if manifest["algorithm"] == "rm":
        pad = manifest["score_pad"] if "score_pad" in manifest else int(manifest["data"]["pad"])
        model_type = _as_classifier(adapter / "config.json", pad)
        backbone = _PREFIXES.get(model_type, "model")
        rename_tensors(state / WEIGHTS, adapter / WEIGHTS, lambda name: _in(backbone, name))
    else:
        shutil.copyfile(state / WEIGHTS, adapter / WEIGHTS)


def _in(backbone: str, name: str) -> str:
    head, _, rest = name.partition(".")
    return f"{backbone}.{rest}" if head == "model" else name


def check_export(state: Path, directory: Path, base: str = "") -> str:
    """Load the export of the unpacked snapshot `state` in `directory`, and compare its outputs and tokenizer with those
    that the trainer left in the snapshot. Blocking.

    `base` is that of an adapter. Returns why nothing was compared, for users, or "". Raises ConfigError if they differ.
    """
    if not (state / PROBE).is_file():
        return ""  # of a snapshot of an earlier version
    if missing := _missing("torch", "transformers", *(["peft"] if base else [])):
        return f"this host lacks {missing}"
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = python_module(_CHECK, str(state), str(directory), base)
    done = run(command, env=os.environ | quiet)
    said: dict[str, str] = {"fault": f"it cannot be loaded: {done.reason or _NO_REASON}"}
    if not done.code:
        said = json.loads(done.stdout.splitlines()[-1])
    if "fault" in said:
        raise ConfigError(f"the export is not what was trained: {said['fault']}. The snapshot is as it was")
    return said.get("unchecked", "")


def _missing(*packages: str) -> str:
    return ", ".join(name for name in packages if find_spec(name) is None)


def _as_classifier(path: Path, pad: int | None) -> str:
    """Convert the configuration to a classifier's and return the `model_type`. The score is that of the last token that
    is not padding, so the padding token must be known."""
    config: dict[str, Any] = json.loads(path.read_text("utf-8"))
    known: list[str] = config.get("architectures") or []
    names = [re.sub("ForCausalLM|LMHeadModel", "ForSequenceClassification", name) for name in known]
    config |= {"architectures": names, "num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    config |= {"pad_token_id": pad}
    path.write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    return str(config.get("model_type", ""))


# ---- adapters


def _write_adapter(weights: Path, directory: Path, base: str, task: str) -> None:
    shutil.copyfile(weights, directory / ADAPTER_WEIGHTS)  # under peft's names already
    config: dict[str, Any] = json.loads((directory / ADAPTER).read_text("utf-8"))
    base = base or config["base_model_name_or_path"]  # else as whoever trained it named it
    config |= {"base_model_name_or_path": base, "inference_mode": True, "task_type": task}
    (directory / ADAPTER).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def _merge(adapter: Path, base: str, directory: Path) -> None:
    """Merge in a separate process: nothing here imports an engine."""
    if missing := _missing("torch", "transformers", "peft"):
        raise ConfigError(f'--merged needs {missing} on this host: pip install "rollout-engine[train]"')
    command = python_module(_MERGE, str(adapter), base, str(directory))
    done = run(command)
    if done.code:
        raise ConfigError(f"--merged: the adapter cannot be merged with {base}: {done.reason or _NO_REASON}")
    for path in sorted(adapter.iterdir()):
        if path.name not in (ADAPTER, ADAPTER_WEIGHTS) and not (directory / path.name).exists():
            shutil.copyfile(path, directory / path.name)


def _keep_ids(files: Path, directory: Path) -> None:
    """Set the special tokens of the training tokenizer, rather than those of the base."""
    for name in _OF_WHOLE_MODELS:
        ours, merged = files / name, directory / name
        if ours.is_file() and merged.is_file():
            known: dict[str, Any] = json.loads(ours.read_text("utf-8"))
            ids = {key: known[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in known}
            config: dict[str, Any] = json.loads(merged.read_text("utf-8")) | ids
            merged.write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def rename_tensors(source: Path, target: Path, rename: Callable[[str], str]) -> None:
    """Copy a safetensors file with other names: the names are in a JSON header, and the bytes after it are copied
    unchanged, in constant memory. Raises ObjectCorruptError or OSError."""
    with source.open("rb") as read, target.open("wb") as write:
        try:
            (size,) = struct.unpack("<Q", read.read(8))
            header: dict[str, Any] = json.loads(read.read(size))
        except (struct.error, ValueError) as error:
            raise ObjectCorruptError(f"{source} is no safetensors file: {error}") from error
        renamed = {name if name == "__metadata__" else rename(name): entry for name, entry in header.items()}
        text = json.dumps(renamed, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the format aligns what follows
        write.write(struct.pack("<Q", len(text)) + text)
        shutil.copyfileobj(read, write, 1 << 20)
