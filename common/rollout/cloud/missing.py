"""Import of SDKs that only an extra installs."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from rollout.model.errors import ConfigError


def need(module: str, extra: str, why: str) -> ModuleType:
    """Return the imported `module`. Raises ConfigError with the install command; `why` is what needs it, such as
    "[cloud.s3]"."""
    try:
        return import_module(module)
    except ModuleNotFoundError as e:
        raise ConfigError(
            f"{why} needs the package {e.name or module}, which is not installed: pip install 'rollout-engine[{extra}]'"
        ) from e
