"""Adapters by name: what installed packages register under an entry point group, ours as third parties'."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from rollout.model.errors import ConfigError


def find_adapter(group: str, name: str, setting: str) -> EntryPoint:
    """What is registered as `name` in `group`. ConfigError, which begins with `setting`, if no package has it."""
    found = entry_points(group=group)
    if name not in found.names:
        raise ConfigError(
            f'{setting} "{name}" is not installed; known: {", ".join(sorted(found.names)) or "none"}. '
            f"A package provides one through the entry point group {group}"
        )
    return found[name]


def load_adapter(group: str, name: str, setting: str) -> Any:
    """As `find_adapter`, imported."""
    return find_adapter(group, name, setting).load()
