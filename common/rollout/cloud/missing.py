"""SDKs that are only there with an extra."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from rollout.model.errors import ConfigError


def need(module: str, extra: str, why: str) -> ModuleType:
    """The imported `module`. ConfigError that names the install command; `why` is what needs it, as "[cloud.s3]"."""
    try:
        return import_module(module)
    except ModuleNotFoundError as e:
        raise ConfigError(
            f"{why} needs the package {e.name or module}, which is not installed: pip install 'rollout-engine[{extra}]'"
        ) from e
