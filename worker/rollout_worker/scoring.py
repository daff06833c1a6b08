"""The function of items of `map` that score a group, or play an environment of it."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, cast

from rollout_worker.rewards import score


def answer(row: dict[str, Any]) -> Any:
    """`row`: a `Scoring` or a `Play` (rollout.workloads.train.rollouts).

    {"tag": of the row, "value": what `score` or `play` returns}, or what to wait for, which then is that.
    """
    if "environment" in row:
        from rollout_worker.environments import play  # it takes a while, and most have none

        value = play(row)
    else:
        value = score(row)
    if isinstance(value, Awaitable):
        return _tagged(row["tag"], cast("Awaitable[Any]", value))
    return {"tag": row["tag"], "value": value}


async def _tagged(tag: str, value: Awaitable[Any]) -> dict[str, Any]:
    return {"tag": tag, "value": await value}
