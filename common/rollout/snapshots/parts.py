"""The kinds and parts of snapshots."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from blake3 import blake3

from rollout.model.errors import ObjectCorruptError

FORMAT = 1
Kind = Literal["train_state", "buffer", "process", "episodic_memory"]
"""`kind` of the manifest. train_state is what training continues from. The others are reserved for future workloads: a
replay buffer, the state of a process, what an agent remembers between episodes. Only their frame is fixed: a directory
with `manifest.json`, packed by `rollout.snapshots.tar`."""
MANIFEST = "manifest.json"
_PARTS = (
    ("weights", "model.safetensors"),
    ("critic", "critic."),
    ("optimizer", "optimizer"),
    ("schedule", "schedule"),
    ("rng", "random-"),
    ("model", "model/"),
    ("probe", "probe."),
    ("manifest", MANIFEST),
)
"""Name of a part, and the prefix of its files."""


def parts_of(members: Mapping[str, str]) -> dict[str, str]:
    """Return a hash in hex for each part, from those of an archive's files by name."""
    hashers: dict[str, Any] = {}
    for name, digest in sorted(members.items()):
        part = next((part for part, prefix in _PARTS if name.startswith(prefix)), "other")
        hashers.setdefault(part, blake3()).update(f"{name}\0{digest}\0".encode())
    return {part: hasher.hexdigest() for part, hasher in hashers.items()}


def read_manifest(directory: Path, kind: Kind) -> dict[str, Any]:
    """Read the manifest of an unpacked snapshot. Raises ObjectCorruptError if it is invalid, of another kind, or
    newer."""
    try:
        found: Any = json.loads((directory / MANIFEST).read_text("utf-8"))
        number, seen = found["format"], found["kind"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ObjectCorruptError(f"this is no snapshot: its {MANIFEST} cannot be read: {error}") from error
    if number != FORMAT:
        raise ObjectCorruptError(f"the snapshot has format {number}, and this program reads {FORMAT}: upgrade it")
    if seen != kind:
        raise ObjectCorruptError(f"this is a snapshot of kind {seen!r}, and not {kind!r}")
    return found
