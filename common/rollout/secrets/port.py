"""Port of read-only, allowlisted secrets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rollout.model.errors import UnavailableError


class SecretUnsetError(UnavailableError):
    """An allowed secret that nobody has set; that may be as intended."""

    code = "secret_not_set"


class SecretStore(Protocol):
    @property
    def allowed(self) -> Mapping[str, str]:
        """Names that may be read, by the environment variable in which executors' processes find them."""
        ...

    async def get(self, name: str) -> str:
        """Return a secret's value.

        Raises ConfigError if the name is not on the allowlist or can never be read, SecretUnsetError if nobody has set
        it, which may be intended, and UnavailableError if it may be read later. No error quotes a value.
        """
        ...

    async def close(self) -> None: ...
