"""Read-only, allowlisted secrets."""

from __future__ import annotations

from typing import Protocol


class SecretStore(Protocol):
    async def get(self, name: str) -> str:
        """ConfigError: not on the allowlist. UnavailableError: allowed, but not set (may be provisioned later)."""
        ...

    async def close(self) -> None: ...
