"""Adapters by name: what installed packages register under an entry point group, ours and third parties' alike."""

from __future__ import annotations

from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from rollout.model.errors import ConfigError


def find_adapter(group: str, name: str, setting: str, what: str = "backend") -> EntryPoint:
    """Return the entry point `name` of `group`.

    Raises ConfigError, whose message begins with `setting` and calls the adapter `what`, if no package registers it.
    """
    found = entry_points(group=group)
    if name not in found.names:
        near = get_close_matches(name, found.names, n=1)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        known = ", ".join(sorted(found.names)) or "none"
        raise ConfigError(f'{setting}: unknown {what} "{name}"; known: {known}{hint}')
    return found[name]


def load_adapter(group: str, name: str, setting: str) -> Any:
    """Import and return what `find_adapter` finds."""
    return find_adapter(group, name, setting).load()
