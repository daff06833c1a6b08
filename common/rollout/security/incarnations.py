"""Whose an incarnation is: the host that bought its first certificate. Nobody else may speak under that name."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, cast

from rollout.model.errors import AuthError, UnavailableError
from rollout.security.tokens import NAMESPACE
from rollout.storage.port import Storage, Transaction

PREFIX = "incarnation/"
CAS_TRIES = 50
FORGET_AFTER_S = 86_400.0
"""A claim outlives the last certificate that was sold under it by so long: clocks of hosts and of leaders differ."""


async def claim_incarnation(
    storage: Transaction,
    incarnation: str,
    host_id: str,
    lifetime_s: float,
    clock: Callable[[], float] = time.time,
) -> None:
    """Keeps `incarnation` for this host until its certificate of `lifetime_s` seconds has expired. AuthError: it is
    another host's."""
    until_ms = int((clock() + lifetime_s) * 1000)
    for _ in range(CAS_TRIES):
        stored = await storage.get(NAMESPACE, PREFIX + incarnation)
        if stored is not None and _decode(stored)["host"] != host_id:
            raise AuthError(
                f"Incarnation {incarnation} belongs to another host of this cluster; start the process anew, without "
                "--worker-id or with an id of its own."
            )
        claim = json.dumps({"host": host_id, "until_ms": until_ms}, separators=(",", ":")).encode()
        if await storage.cas(NAMESPACE, PREFIX + incarnation, stored, claim):
            return
    raise UnavailableError(f"The record of incarnation {incarnation} keeps changing; try again in a moment.")


async def forget_incarnations(storage: Storage, clock: Callable[[], float] = time.time) -> int:
    """Removes the claims whose certificates expired more than a day ago; how many."""
    before_ms = (clock() - FORGET_AFTER_S) * 1000
    removed = 0
    for key, value in await storage.scan(NAMESPACE, PREFIX):
        if _decode(value)["until_ms"] < before_ms:
            removed += await storage.cas(NAMESPACE, key, value, None)  # unless it is renewed at this moment
    return removed


def _decode(value: bytes) -> dict[str, Any]:
    return cast("dict[str, Any]", json.loads(value))
