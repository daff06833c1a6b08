"""The leader's housekeeping, a little at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog
from rollout.model.errors import FencedError, RolloutError
from rollout.security.claims import forget_claims

from rollout_coordinator.freeing import free_let_go
from rollout_coordinator.gc import collect_garbage
from rollout_coordinator.ledger.ledger import Ledger
from rollout_coordinator.ledger.port import OUTPUT_ALL
from rollout_coordinator.wiring import Parts

log = structlog.get_logger()

PURGE_S = 5.0
PURGE_ROWS = 2000
PURGE_PAUSE_S = 0.05
GARBAGE_EVERY_S = 3600.0
TRIM_EVERY_S = 60.0
GARBAGE_GRACE_S = 24 * 3600.0
KEEP_WORKERS_MS = 7 * 86_400_000
"""How long an ended incarnation is shown, and refused if it was quarantined."""


async def maintain(p: Parts) -> None:
    """Clean up until cancelled: rows of deleted runs and released objects; each minute output beyond the limit of all
    runs; each hour objects that nothing refers to, and old workers and claims."""
    hourly_at, trim_at = p.clock.now().mono + GARBAGE_EVERY_S, 0.0
    while True:
        await asyncio.sleep(PURGE_S)
        try:
            await _until_none(lambda: p.ledger.purge(PURGE_ROWS))
            await free_let_go(p.store, p.ledger, p.gate.epoch, p.objects_gate.forget)
            if p.clock.now().mono >= trim_at:
                trim_at = p.clock.now().mono + TRIM_EVERY_S
                for run_id, size in await p.ledger.trim_output(OUTPUT_ALL):
                    p.history.note("output_removed", run_id=run_id, bytes=size)
            if p.clock.now().mono >= hourly_at:
                hourly_at = p.clock.now().mono + GARBAGE_EVERY_S
                await collect_garbage(p.store, p.ledger, GARBAGE_GRACE_S, forget=p.objects_gate.forget)
                await forget_workers(p.ledger, p.clock.now().wall_ms)
                await forget_claims(p.storage)
        except FencedError:
            return  # another one leads
        except RolloutError as error:
            log.warning("maintenance_failed", error=str(error))


async def forget_workers(ledger: Ledger, wall_ms: int) -> None:
    """Remove the rows of incarnations that ended more than `KEEP_WORKERS_MS` ago."""
    await _until_none(lambda: ledger.forget_workers(wall_ms - KEEP_WORKERS_MS, PURGE_ROWS))


async def _until_none(remove: Callable[[], Awaitable[int]]) -> None:
    """Call it until it removes nothing."""
    removed = PURGE_ROWS
    while removed:
        removed = await remove()
        await asyncio.sleep(PURGE_PAUSE_S)
