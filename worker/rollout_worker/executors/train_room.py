"""What a training run does when a disk or the store is full: it keeps what it has, says so, and goes on with room.

To fail would cost a segment and the run: what a person can mend in a minute must not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rollout.model.errors import AttemptError, RolloutError

from rollout_worker.backends.training.faults import is_full
from rollout_worker.executors.port import DISK_FULL, STORE_AWAY, Context

FIRST_S, MOST_S = 1.0, 10.0
"""Pauses between two tries grow from the one to the other."""
_CODES = {
    "storage_full": DISK_FULL,
    DISK_FULL: DISK_FULL,
    "storage_unavailable": STORE_AWAY,
    "storage_fault": STORE_AWAY,
    "unavailable": STORE_AWAY,
}
T = TypeVar("T")


def waits_for(error: Exception) -> str:
    """The code of the cause that may end by itself or by a person's hand; empty: it is another error."""
    code = error.error_code if isinstance(error, AttemptError) else getattr(error, "code", "")
    if isinstance(error, RolloutError) and code in _CODES:
        return _CODES[code]
    return DISK_FULL if is_full(error) else ""


async def with_room(what: str, work: Callable[[], Awaitable[T]], context: Context) -> T:
    """What `work` returns, which is tried for as long as there is no room; `what` names what it does not do then."""
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
    """People see it as they see what a worker cannot start."""
    when = "there is room" if code == DISK_FULL else "it is back"
    context.hindered(f"{what}: {error}; the run keeps what it has and goes on by itself when {when}", code=code)
