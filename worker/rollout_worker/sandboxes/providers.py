"""Providers by name: the built-in ones and those of installed packages (entry point group `rollout.sandboxes`)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from rollout.config.adapters import find_adapter
from rollout.model.errors import ConfigError
from rollout.processes.interpreter import import_from

from rollout_worker.sandboxes.port import Provider

GROUP = "rollout.sandboxes"

Factory = Callable[[Path, Mapping[str, Any]], Provider]

_NONE: Mapping[str, Any] = MappingProxyType({})


def open_provider(name: str, state: Path, config: Mapping[str, Any] = _NONE, *, key: str = "sandboxes") -> Provider:
    """Open the provider of that name; use it with `async with`.

    `name` is a registered one, or `module:Class` of any callable that takes (state, config) and returns a provider.
    `state` is where providers of this host keep claims and sandboxes. `config` holds the provider's own settings. `key`
    names the setting in an error. Raises ConfigError if nobody has the name or settings are wrong, one line for each.
    """
    factory: Factory = _named(name, key) if ":" in name else find_adapter(GROUP, name, key, what="provider").load()
    return factory(state, config)


def _named(name: str, key: str) -> Factory:
    module, _, attribute = name.partition(":")
    import_from(str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}: {name} cannot be loaded: {error}") from error
    if not callable(found):
        raise ConfigError(f"{key}: {name} is no class and no function that makes a provider")
    return cast(Factory, found)
