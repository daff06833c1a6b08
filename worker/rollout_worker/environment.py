"""What child processes find in their environment: this daemon's variables, its secrets only by the allowlist."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import structlog
from rollout.config.environment import SECRET_PREFIX
from rollout.config.logging import hide
from rollout.config.parent import PARENT_FD
from rollout.model.errors import UnavailableError
from rollout.secrets import SecretStore

log = structlog.get_logger()


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's variables without ROLLOUT_SECRET_*, and `extra`, which wins."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(SECRET_PREFIX) and k != PARENT_FD}
    return {**kept, "PYTHONUNBUFFERED": "1", **extra}


class AllowedSecrets:
    """The secrets of the allowlist, for executors' processes. Asked anew for each: one may be set or changed later."""

    def __init__(self, store: SecretStore, names: Iterable[str]) -> None:
        self._store = store
        self._names = tuple(names)

    async def read(self) -> dict[str, str]:
        """Those that are set, by name; from now on no log line of this process shows their values."""
        found: dict[str, str] = {}
        for name in self._names:
            try:
                value = await self._store.get(name)
            except UnavailableError as error:
                log.debug("secret_not_set", name=name, error=error.message)
                continue
            hide(value)
            found[name] = value
        return found

    async def close(self) -> None:
        await self._store.close()
