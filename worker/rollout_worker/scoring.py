"""Function of `map` items that score a group, or play one of its environments."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, cast

from rollout_worker.rewards import score


def answer(row: dict[str, Any]) -> Any:
    """Return {"tag": the row's, "value": what `score` or `play` returns}, or an awaitable of that.

    `row` is a `Scoring` or a `Play` (rollout.workloads.train.rollouts).
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
