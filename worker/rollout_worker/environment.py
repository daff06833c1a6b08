"""Environment of child processes: this daemon's variables, and its secrets only by the allowlist."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

import structlog
from rollout.config.logging import hide
from rollout.config.secret_names import SECRET_PREFIX
from rollout.model.errors import AttemptError, RolloutError
from rollout.processes.parent import PARENT_FD
from rollout.secrets import SecretStore, SecretUnsetError

log = structlog.get_logger()


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return this process's variables without ROLLOUT_SECRET_*, overridden by `extra`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(SECRET_PREFIX) and k != PARENT_FD}
    return {**kept, "PYTHONUNBUFFERED": "1", **extra}


class AllowedSecrets:
    """Secrets of the allowlist for executors' processes, read anew for each, because one may be set or changed
    later."""

    def __init__(self, store: SecretStore) -> None:
        self._store = store

    async def read(self) -> dict[str, str]:
        """Return the secrets that are set, by variable, and hide their values in this process's log from now on.

        Raises AttemptError `secret_not_set` with all required secrets that cannot be read: nothing starts without them.
        """
        allowed = self._store.allowed
        values = await asyncio.gather(*map(self._store.get, allowed.values()), return_exceptions=True)
        found: dict[str, str] = {}
        faults: list[RolloutError] = []
        for (variable, name), value in zip(allowed.items(), values, strict=True):
            if isinstance(value, str):
                hide(value)
                found[variable] = value
            elif isinstance(value, SecretUnsetError):
                log.debug("secret_not_set", name=name, error=value.message)
            elif isinstance(value, RolloutError):
                faults.append(value)
            else:
                raise value
        if faults:
            message = "; ".join(fault.message for fault in faults)
            raise AttemptError(message, code="secret_not_set", retry=all(fault.retryable for fault in faults))
        return found

    async def close(self) -> None:
        await self._store.close()
