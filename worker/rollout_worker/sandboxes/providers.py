"""Providers by name: the built-in ones and those of installed packages (entry point group `rollout.sandboxes`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rollout.config.adapters import find_adapter

from rollout_worker.sandboxes.port import Provider

GROUP = "rollout.sandboxes"


def open_provider(name: str, state: Path, *, key: str = "sandboxes") -> Provider:
    """The provider of that name, with its defaults; use it with `async with`. ConfigError: no package has it.

    `state`: where providers of this host keep claims and sandboxes. `key`: what the name was given for, in an error.
    """
    factory: Callable[[Path], Provider] = find_adapter(GROUP, name, key, what="provider").load()
    return factory(state)
