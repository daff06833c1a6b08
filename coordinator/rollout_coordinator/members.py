"""The coordinators of a cluster: each records its address, leader or standby, and the leader publishes all of them.

Workers and clients keep these addresses, so one address is enough to find the cluster after a failover.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import suppress

import structlog
from rollout.model.errors import StorageError
from rollout.storage.port import Storage

log = structlog.get_logger()

NAMESPACE = "coordinators"
REFRESH_S = 5.0
WRITE_S = 30.0
KEEP_S = 86_400.0
"""How long an absent coordinator is remembered: one under repair is still published."""
KEEP_LOCAL_S = 60.0
"""The same on SQLite, whose coordinators share one machine and may change their port with each start."""


class Members:
    """`told` are the addresses of all, as last read. `configured` ones, which a user wrote, come first."""

    def __init__(
        self, storage: Storage, configured: Sequence[str], wall_ms: Callable[[], int], *, keep_s: float = KEEP_S
    ) -> None:
        self._storage = storage
        self._configured = tuple(configured)
        self._wall_ms = wall_ms
        self._keep_ms = keep_s * 1000
        self._own = ""
        self._seen_ms: dict[str, int] = {}
        self.told: list[str] = list(configured)

    async def register(self, address: str) -> None:
        """Record this coordinator's `address`. Raises StorageError."""
        await self.refresh()  # first: what an earlier process wrote of this address is overwritten then
        self._own = address
        await self._write()
        await self.refresh()

    def seen_ms(self, address: str) -> int:
        """Return when the coordinator there last recorded itself, to half a minute (unix time), 0 if unknown. For this
        one's own address it is the previous process."""
        return self._seen_ms.get(address, 0)

    async def refresh(self) -> None:
        """Read the addresses again. If it raises StorageError, the previous ones remain."""
        oldest = self._wall_ms() - self._keep_ms
        seen = {key: _seen_ms(value) for key, value in await self._storage.scan(NAMESPACE)}
        self._seen_ms |= {address: at for address, at in seen.items() if address != self._own}
        found = [address for address, at in seen.items() if at >= oldest]
        self.told = list(dict.fromkeys([*self._configured, *([self._own] if self._own else []), *found]))

    async def _write(self) -> None:
        value = json.dumps({"seen_ms": self._wall_ms()}).encode()
        await self._storage.put(NAMESPACE, self._own, value)

    async def run(self) -> None:
        """Refresh until cancelled. While the store is unavailable, the data only gets older."""
        rounds = 0
        while True:
            await asyncio.sleep(REFRESH_S)
            rounds += 1
            try:
                if rounds % (WRITE_S // REFRESH_S) == 0:
                    await self._write()
                await self.refresh()
            except StorageError as error:
                log.debug("coordinators_not_read", reason=str(error))


def _seen_ms(value: bytes) -> int:
    with suppress(ValueError, TypeError, KeyError):
        return int(json.loads(value)["seen_ms"])
    return 0
