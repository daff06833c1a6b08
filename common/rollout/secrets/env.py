"""Secrets from the environment: `ROLLOUT_SECRET_<NAME>`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from rollout.config.cloud import CloudSection
from rollout.config.secret_names import SECRET_PREFIX as PREFIX
from rollout.config.settings import SecretsSection
from rollout.model.errors import ConfigError
from rollout.secrets.port import SecretUnsetError

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


def open_store(section: SecretsSection, cloud: CloudSection) -> EnvSecretStore:
    return EnvSecretStore(section.allow)


class EnvSecretStore:
    """Store that reads the environment at each call, so that a variable provisioned later is found."""

    def __init__(self, allow: Iterable[str], environ: Mapping[str, str] | None = None) -> None:
        self._allow = frozenset(allow)
        self._environ = os.environ if environ is None else environ
        for name in sorted(self._allow):
            if not _NAME.fullmatch(name):
                raise ConfigError(f"[secrets] allow: {name!r} cannot be the name of a secret: letters, digits, _")
            if name.upper().startswith(PREFIX):
                raise ConfigError(f"[secrets] allow: write {name[len(PREFIX) :]!r} without the prefix {PREFIX}")

    @property
    def allowed(self) -> Mapping[str, str]:
        return {name: name for name in sorted(self._allow)}

    async def get(self, name: str) -> str:
        if name not in self._allow:
            raise ConfigError(f"secret {name!r} is not in the allowlist; add it to [secrets] allow")
        value = self._environ.get(PREFIX + name.upper()) or self._environ.get(PREFIX + name)
        if not value:
            raise SecretUnsetError(f"secret {name!r} is allowed but not set; set {PREFIX}{name.upper()}")
        return value

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""
