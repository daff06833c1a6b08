"""Secrets: read-only, and only those on the allowlist.

One backend, one list. `env` reads the names of `[secrets] allow`; a provider's store reads those of `[cloud.secrets]
allowlist` and `[secrets] allow` together. The backend is `[secrets] backend`, or, if that is empty, the store of
`[cloud] provider` if `[cloud.secrets] allowlist` names anything, else `env`.
"""

from __future__ import annotations

from collections.abc import Callable

from rollout.config.adapters import load_adapter
from rollout.config.cloud import NO_CLOUD, CloudSection
from rollout.config.settings import SecretsSection
from rollout.model.errors import ConfigError
from rollout.secrets.port import SecretStore, SecretUnsetError

__all__ = ["SecretStore", "SecretUnsetError", "backend_of", "open_secrets"]

GROUP = "rollout.secrets"


def backend_of(section: SecretsSection, cloud: CloudSection = NO_CLOUD) -> str:
    """Return the backend's name. Raises ConfigError for a provider that is not the one of [cloud]."""
    if section.backend in ("aws", "gcp") and section.backend != cloud.provider:
        there = f'it is "{cloud.provider}"' if cloud.provider else "there is none"
        backend = section.backend
        raise ConfigError(f'[secrets] backend = "{backend}" needs [cloud] provider = "{backend}"; {there}')
    return section.backend or (cloud.provider if cloud.secrets.allowlist else "") or "env"


def open_secrets(section: SecretsSection, cloud: CloudSection = NO_CLOUD) -> SecretStore:
    """Return the store of `[secrets] backend`. Raises ConfigError if no installed package provides it."""
    backend = backend_of(section, cloud)
    factory: Callable[[SecretsSection, CloudSection], SecretStore] = load_adapter(GROUP, backend, "[secrets] backend")
    return factory(section, cloud)
