"""Secrets: read-only, and only those on the allowlist."""

from __future__ import annotations

from collections.abc import Callable

from rollout.config.adapters import load_adapter
from rollout.config.cloud import NO_CLOUD, CloudSection
from rollout.config.settings import SecretsSection
from rollout.secrets.port import SecretStore

__all__ = ["SecretStore", "open_secrets"]

GROUP = "rollout.secrets"


def open_secrets(section: SecretsSection, cloud: CloudSection = NO_CLOUD) -> SecretStore:
    """The store that `[secrets] backend` names. ConfigError if no installed package provides it."""
    factory: Callable[[SecretsSection, CloudSection], SecretStore] = load_adapter(
        GROUP, section.backend, "[secrets] backend"
    )
    return factory(section, cloud)
