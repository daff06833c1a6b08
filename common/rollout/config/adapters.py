"""Adapters by name: what installed packages register under an entry point group, ours as third parties'."""

from __future__ import annotations

from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from rollout.model.errors import ConfigError


def find_adapter(group: str, name: str, setting: str, what: str = "backend") -> EntryPoint:
    """What is registered as `name` in `group`. ConfigError, which begins with `setting`, if no package has it; `what`:
    what it would be."""
    found = entry_points(group=group)
    if name not in found.names:
        near = get_close_matches(name, found.names, n=1)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        known = ", ".join(sorted(found.names)) or "none"
        raise ConfigError(f'{setting}: unknown {what} "{name}"; known: {known}{hint}')
    return found[name]


def load_adapter(group: str, name: str, setting: str) -> Any:
    """As `find_adapter`, imported."""
    return find_adapter(group, name, setting).load()
