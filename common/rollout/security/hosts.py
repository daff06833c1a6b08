"""Hosts that joined, and hosts that were revoked."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import structlog

from rollout.model.errors import NotFoundError, StorageError, UnavailableError
from rollout.model.ids import short
from rollout.security.roles import Role
from rollout.security.tokens import NAMESPACE
from rollout.storage.port import Storage, Transaction

log = structlog.get_logger()

PREFIX = "host/"
REFRESH_S = 10.0
CAS_TRIES = 50


@dataclass(frozen=True, slots=True)
class Host:
    id: str
    role: Role
    name: str
    key: str  # fingerprint of its public key
    enrolled_ms: int
    revoked_ms: int = 0

    @property
    def revoked(self) -> bool:
        return self.revoked_ms > 0


def _encode(host: Host) -> bytes:
    return json.dumps(asdict(host), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _decode(value: bytes) -> Host:
    fields = cast("dict[str, Any]", json.loads(value))
    role = Role(fields.pop("role"))
    return Host(role=role, **fields)


async def find_host(storage: Transaction, host_id: str) -> Host | None:
    value = await storage.get(NAMESPACE, PREFIX + host_id)
    return None if value is None else _decode(value)


async def host_name(storage: Transaction, host_id: str) -> str:
    """Return a host's name for users, with a suffix that distinguishes hosts of the same name."""
    host = await find_host(storage, host_id) if host_id else None
    if host is None:
        return short(host_id)
    return f"{host.name} ({short(host_id)})" if host.name else short(host_id)


async def list_hosts(storage: Transaction) -> list[Host]:
    """Return every host that ever joined, in order of enrolment."""
    found = [_decode(value) for _, value in await storage.scan(NAMESPACE, PREFIX)]
    return sorted(found, key=lambda host: (host.enrolled_ms, host.id))


async def remember_host(storage: Transaction, host: Host) -> None:
    """Save a host. Only the name of a known host changes: a revoked one stays revoked."""
    for _ in range(CAS_TRIES):
        stored = await storage.get(NAMESPACE, PREFIX + host.id)
        wanted = host if stored is None else replace(_decode(stored), name=host.name)
        if await storage.cas(NAMESPACE, PREFIX + host.id, stored, _encode(wanted)):
            return
    raise UnavailableError("The host's record keeps changing; try again in a moment.")


async def revoke_host(storage: Transaction, host_id: str, clock: Callable[[], float] = time.time) -> Host:
    """Exclude a host: coordinators refuse its calls and its requests for certificates within a minute.

    Revoking again changes nothing. Raises NotFoundError if no such host ever joined.
    """
    for _ in range(CAS_TRIES):
        stored = await storage.get(NAMESPACE, PREFIX + host_id)
        if stored is None:
            raise NotFoundError(f"No host {host_id} has joined; `rollout-coordinator host list` shows those that have.")
        host = _decode(stored)
        if host.revoked:
            return host
        host = replace(host, revoked_ms=int(clock() * 1000))
        if await storage.cas(NAMESPACE, PREFIX + host_id, stored, _encode(host)):
            log.info("host_revoked", host=host_id, name=host.name, role=host.role)
            return host
    raise UnavailableError("The host's record keeps changing; try again in a moment.")


class Revocations:
    """The revoked hosts as last read, to check on every call. `run` keeps them fresh."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._revoked: frozenset[str] = frozenset()

    def is_revoked(self, host_id: str) -> bool:
        return host_id in self._revoked

    async def refresh(self) -> None:
        """Read the revoked hosts. If it raises StorageError, the previous ones remain in force."""
        self._revoked = frozenset(host.id for host in await list_hosts(self._storage) if host.revoked)

    async def run(self, interval_s: float = REFRESH_S) -> None:
        """Refresh until cancelled. While the store is unavailable, the data only gets older."""
        while True:
            try:
                await self.refresh()
            except StorageError as error:
                log.warning("revocations_not_read", reason=str(error))
            await asyncio.sleep(interval_s)
