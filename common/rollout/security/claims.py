"""Records which host an incarnation belongs to: the first one that bought a certificate for it.

A host may name any incarnation when it buys a certificate. Without this record one host could buy the identity of
another's worker.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import cast

from rollout.model.errors import AuthError, TransactionConflictError, UnavailableError
from rollout.security.tokens import NAMESPACE
from rollout.storage.port import Storage, Transaction

PREFIX = "incarnation/"
KEEP_S = 24 * 3600.0
"""A claim outlives the last certificate sold under it by at least half of this, more than clocks of coordinators
differ. After that, the incarnation can no longer connect."""

CAS_TRIES = 50
PAGE = 500
_ULID_CHARACTERS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def _encode(host_id: str, until_ms: int) -> bytes:
    return json.dumps({"host": host_id, "until_ms": until_ms}, separators=(",", ":")).encode()


def _decode(value: bytes) -> tuple[str, int]:
    fields = json.loads(value)
    return cast(str, fields["host"]), cast(int, fields["until_ms"])


async def claim_incarnation(storage: Transaction, incarnation: str, host_id: str, not_after: float) -> None:
    """Claim the incarnation before a certificate that ends at `not_after` (unix seconds) is sold. Raises AuthError if
    another host has it.

    It takes one compare-and-swap for a process that starts, a read for one that renews, and a write twice in `KEEP_S`.
    """
    key = PREFIX + incarnation
    wanted = _encode(host_id, int((not_after + KEEP_S) * 1000))
    for _ in range(CAS_TRIES):
        stored = await storage.get(NAMESPACE, key)
        if stored is not None:
            owner, until_ms = _decode(stored)
            if owner != host_id:
                raise AuthError(
                    f"Incarnation {incarnation} belongs to host {owner}, which bought its first certificate, not to "
                    f"{host_id}; start this process anew, without --worker-id, for an incarnation of its own."
                )
            if until_ms >= (not_after + KEEP_S / 2) * 1000:
                return
        if await storage.cas(NAMESPACE, key, stored, wanted):
            return
    raise UnavailableError("The incarnation's record keeps changing; try again in a moment.")


async def forget_claims(storage: Storage, clock: Callable[[], float] = time.time) -> int:
    """Remove claims whose certificates expired long ago, and return their number. Each page is a transaction."""
    removed = 0
    async with aclosing(_pages(storage, PREFIX)) as pages:
        async for page in pages:
            over = [(key, value) for key, value in page if _decode(value)[1] < clock() * 1000]
            if not over:
                continue
            try:
                async with storage.transaction() as changing:
                    for key, value in over:
                        await changing.cas(NAMESPACE, key, value, None)
            except TransactionConflictError:
                continue  # one of them was renewed just now; the others go the next time
            removed += len(over)
    return removed


async def _pages(storage: Storage, prefix: str) -> AsyncGenerator[list[tuple[str, bytes]]]:
    """Yield all claims, a few at a time: a prefix with more is split by its next character."""
    found = await storage.scan(NAMESPACE, prefix, PAGE)
    if len(found) < PAGE:
        yield found
        return
    for character in _ULID_CHARACTERS:
        async with aclosing(_pages(storage, prefix + character)) as pages:
            async for page in pages:
                yield page
