"""Training while a disk or the store is full: the run keeps what it has, reports the cause, and continues with space.

Failing would cost a segment and the run for what a user can mend in a minute.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rollout.model.errors import AttemptError, RolloutError

from rollout_worker.backends.training.faults import is_full
from rollout_worker.executors.port import DISK_FULL, STORE_AWAY, Context

FIRST_S, MOST_S = 1.0, 10.0
"""Seconds between two attempts, which grow from the first value to the second."""
_CODES = {
    "storage_full": DISK_FULL,
    DISK_FULL: DISK_FULL,
    "storage_unavailable": STORE_AWAY,
    "storage_fault": STORE_AWAY,
    "unavailable": STORE_AWAY,
}
T = TypeVar("T")


def waits_for(error: Exception) -> str:
    """Return the code of a cause that may end by itself or by a user's action; empty for other errors."""
    code = error.error_code if isinstance(error, AttemptError) else getattr(error, "code", "")
    if isinstance(error, RolloutError) and code in _CODES:
        return _CODES[code]
    return DISK_FULL if is_full(error) else ""


async def with_room(what: str, work: Callable[[], Awaitable[T]], context: Context) -> T:
    """Return what `work` returns, retried for as long as there is no space. `what` names the pending operation."""
    pause = FIRST_S
    while True:
        try:
            found = await work()
        except (OSError, RolloutError) as error:
            code = waits_for(error)
            if not code:
                raise
            tell(what, error, code, context)
        else:
            context.hindered("")
            return found
        await asyncio.sleep(pause)
        pause = min(MOST_S, 1.5 * pause)


def tell(what: str, error: Exception | str, code: str, context: Context) -> None:
    """Report the cause as what a worker cannot start is reported."""
    when = "there is room" if code == DISK_FULL else "it is back"
    context.hindered(f"{what}: {error}; the run keeps what it has and goes on by itself when {when}", code=code)
