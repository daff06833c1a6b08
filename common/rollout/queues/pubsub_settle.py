"""Acknowledgements that may fail singly, as in Pub/Sub subscriptions with exactly-once delivery.

Source: https://cloud.google.com/pubsub/docs/exactly-once-delivery: an error names ids in `google.rpc.ErrorInfo` as
PERMANENT_FAILURE_... or TRANSIENT_FAILURE_...; ids that it does not name are done.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from rollout.model.errors import ConfigError, UnavailableError

ANSWERS = (200, 400, 409, 429, 500, 502, 503, 504)
"""Statuses whose answer may name failures of single ids."""
_AGAIN = frozenset({409, 429, 500, 502, 503, 504})
_LONGEST_S = 5.0


async def settle(
    send: Callable[[list[str]], Awaitable[tuple[int, Mapping[str, Any]]]], ids: list[str], what: str, budget_s: float
) -> set[str]:
    """Send ids until they are confirmed, and return those that were not within `budget_s`.

    `send` returns status and answer. Raises UnavailableError if no id could be confirmed.
    """
    clock = asyncio.get_running_loop().time
    deadline, wait_s = clock() + budget_s, 0.1
    lost: set[str] = set()
    left = list(ids)
    answered = False
    while True:
        status, answer = await send(left)
        if status == 200:
            return lost
        failed = _failures(answer)
        if not failed and status not in _AGAIN:
            raise ConfigError(f"{what}: {_message(answer) or f'HTTP {status}'}")
        if failed:
            answered = True
            lost |= {i for i in left if failed.get(i, "").startswith("PERMANENT")}
            left = [i for i in left if i in failed and i not in lost]
        if not left:
            return lost
        pause = random.uniform(0, wait_s)
        if clock() + pause > deadline:
            if not answered:
                raise UnavailableError(f"{what}: {_message(answer) or f'HTTP {status}'}")
            return lost | set(left)
        await asyncio.sleep(pause)
        wait_s = min(_LONGEST_S, 2 * wait_s)


def _failures(answer: Mapping[str, Any]) -> dict[str, str]:
    error: Mapping[str, Any] = answer.get("error") or {}
    found: dict[str, str] = {}
    for detail in cast("list[Mapping[str, Any]]", error.get("details") or []):
        for name, value in cast("Mapping[str, Any]", detail.get("metadata") or {}).items():
            if str(value).startswith(("PERMANENT_FAILURE", "TRANSIENT_FAILURE")):
                found[name] = str(value)
    return found


def _message(answer: Mapping[str, Any]) -> str:
    error: Mapping[str, Any] = answer.get("error") or {}
    return str(error.get("message", ""))
