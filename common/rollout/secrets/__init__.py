"""Secrets: read-only, and only those on the allowlist."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import cast

from rollout.config.settings import SecretsSection
from rollout.model.errors import ConfigError
from rollout.secrets.port import SecretStore

__all__ = ["SecretStore", "open_secrets"]

GROUP = "rollout.secrets"


def open_secrets(section: SecretsSection) -> SecretStore:
    """The store that `[secrets] backend` names. ConfigError if no installed package provides it."""
    found = entry_points(group=GROUP)
    if section.backend not in found.names:
        raise ConfigError(
            f'[secrets] backend = "{section.backend}" is not installed; known: '
            f"{', '.join(sorted(found.names)) or 'none'}. A package provides one through the entry point group {GROUP}"
        )
    return cast(Callable[[SecretsSection], SecretStore], found[section.backend].load())(section)
