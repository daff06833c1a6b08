"""Output of a dry run beyond the checks: tokens, template, parameters and memory. It builds no model and writes
nothing.

A worker's code counts the tokens in a process of its own, so the client needs none of its libraries.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from rollout.model.errors import InputError
from rollout.processes.command import ended, start, wait
from rollout.processes.interpreter import python_module
from rollout.workloads.json_form import JsonObject
from rollout.workloads.local_model import LocalModel, cached_directory
from rollout.workloads.port import InputReader
from rollout.workloads.train.config import Kind, SftSection, TrainingSection
from rollout.workloads.train.data import Data
from rollout.workloads.train.memory import Memory, estimate, read_shapes
from rollout.workloads.train.policy_config import GenerationSection, PolicySection
from rollout.workloads.train.report import report_lines

_COUNTER = "rollout_worker.backends.training.tokens"
_POLL_S = 0.5


@dataclass(slots=True)
class Preview:
    """`data` has the report of each dataset, empty if tokens cannot be counted here. `memory` is for sequences of
    `length` tokens. `template` renders conversations, if there are any. `notes` say what is unknown, and why."""

    template: str = ""
    data: JsonObject = field(default_factory=JsonObject)
    memory: Memory | None = None
    length: int = 0
    notes: list[str] = field(default_factory=list[str])

    def lines(self) -> list[str]:
        found = [line for name, report in self.data.items() for line in report_lines(name, report)]
        if self.template:
            found.append(f"conversations are rendered by {self.template}")
        if self.memory is not None:
            memory = self.memory
            parts = ("weights", "gradients", "optimizer", "reference", "activations", "generation")
            sizes = ", ".join(f"{name} {size(getattr(memory, name))}" for name in parts if getattr(memory, name))
            found += [
                f"{memory.parameters:,} parameters, of which {memory.trained:,} are trained",
                f"memory: about {size(memory.total)} on each device with {self.length:,} tokens a sequence ({sizes}); "
                f"{size(memory.host)} of the host for snapshots",
            ]
        return found + self.notes

    def to_json(self) -> JsonObject:
        memory = self.memory
        return {
            "template": {"name": self.template},
            "data": self.data,
            "parameters": memory.parameters if memory else None,
            "trained": memory.trained if memory else None,
            "memory_bytes": memory.to_json() if memory else None,
            "snapshot_bytes": memory.host if memory else None,
            "unknown": self.notes,
        }


def preview(
    kind: Kind,
    section: TrainingSection,
    template: str | None,
    model: LocalModel,
    tokenizer: Path | None,
    datasets: Mapping[str, Data],
    reading: InputReader,
    generation: GenerationSection | None = None,
) -> Preview:
    """Preview the training. Raises InputError with all faults of rows whose policy is `error`. Blocking."""
    found = Preview()
    directory = model.path or cached_directory(model)
    if find_spec("transformers") is None or find_spec("rollout_worker") is None:
        found.notes.append(
            'tokens are not counted: this host lacks the package transformers: pip install "rollout-engine[train]"'
        )
    elif directory is None and tokenizer is None and section.base_model.tokenizer is None:
        found.notes.append(f"tokens are not counted: the tokenizer of {model.uri} is not on this host")
    else:
        settings = section.model_dump(mode="json")
        settings["base_model"]["chat_template"] = template
        names = {name: {"kind": data.kind, "files": _files(data), "manifest": ""} for name, data in datasets.items()}
        other = str(tokenizer) if tokenizer is not None else section.base_model.tokenizer
        asked = {
            "kind": kind,
            "settings": settings,
            "datasets": names,
            "tokenizer": other or str(directory),
            "model": str(directory) if directory is not None else None,
        }
        _count(found, asked, reading, conversations=any(data.conversations for data in datasets.values()))
    if directory is None:
        found.notes.append(f"parameters and memory are not known: the files of {model.uri} are not on this host")
    else:
        _measure(found, kind, section, directory, generation)
    return found


def _files(data: Data) -> list[list[str]]:
    """Return (path, name for users) of each file, or of each directory of a dataset."""
    if data.kind in ("dataset_path", "tasks_path"):
        return [[str(Path(name).absolute()), name] for _, name in data.tables]
    return [[str(path), name] for (_, path), (_, name) in zip(data.files, data.tables, strict=True)]


def _measure(
    found: Preview, kind: Kind, section: TrainingSection, directory: Path, generation: GenerationSection | None
) -> None:
    shapes = read_shapes(directory)
    if not shapes:
        found.notes.append(f"parameters and memory are not known: {directory} has no safetensors files")
        return
    config: JsonObject = json.loads((directory / "config.json").read_bytes())
    packed = isinstance(section, SftSection) and section.packed
    longest = max((report["longest"] for report in found.data.values()), default=0)
    if longest and isinstance(section, PolicySection):
        longest = min(longest + section.max_completion_length, section.max_length)
    if longest and not packed:
        update: JsonObject = {"max_length": longest} | ({"packing": None} if isinstance(section, SftSection) else {})
        section = section.model_copy(update=update)
    found.length = section.length if isinstance(section, SftSection) else section.max_length
    found.memory = estimate(kind, section, shapes, config, generation)


def _count(found: Preview, asked: JsonObject, reading: InputReader, *, conversations: bool) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}  # nothing is fetched to look at a configuration
    said = ["counting tokens"]  # once; after that it is only asked whether the user interrupts
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as complaints:
        given.write(json.dumps(asked).encode())
        given.seek(0)
        command = python_module(_COUNTER)
        with ended(start(command, stdin=given, stdout=out, stderr=complaints, env=environment)) as process:
            code = wait(process, lambda: reading.tell(said.pop() if said else ""), _POLL_S)
        lines, errors = _lines(out), _lines(complaints)
    if code or not lines:
        last = (errors or ["no reason was given"])[-1]
        found.notes.append(f"tokens are not counted: {last}")
        return
    answer: JsonObject = json.loads(lines[-1])
    if "error" in answer and answer["code"] != "invalid_data":
        found.notes.append(f"tokens are not counted: {answer['error']}")
    elif "error" in answer:
        raise InputError(answer["error"])
    else:
        found.data = answer["data"]
        found.template = answer["template"] if conversations else ""


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return file.read().decode("utf-8", "replace").strip().splitlines()


def size(count: int) -> str:
    """Format a number of bytes."""
    unit, name = next((one for one in ((1 << 30, "GiB"), (1 << 20, "MiB")) if count >= one[0]), (1 << 10, "KiB"))
    return f"{count / unit:,.1f} {name}"
