"""Findings of checks, and how checks run: concurrently, each with a time limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rollout.model.errors import RolloutError

Level = Literal["ok", "warning", "fault"]
TELL_AFTER_S = 2.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the answer. `remedy` says what to do, if anything."""

    name: str
    level: Level
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """One check. `look` returns findings; after `limit_s` seconds it is abandoned, which is a warning."""

    name: str
    look: Callable[[], Awaitable[list[Finding]]]
    limit_s: float = 10.0


def ok(name: str, text: str) -> Finding:
    return Finding(name, "ok", text)


def warning(name: str, text: str, remedy: str) -> Finding:
    return Finding(name, "warning", text, remedy)


def fault(name: str, text: str, remedy: str) -> Finding:
    return Finding(name, "fault", text, remedy)


def unless(good: bool, name: str, text: str, remedy: str, level: Level = "warning") -> Finding:
    """Return a finding of level `ok` if `good`, else of `level` with its remedy."""
    return ok(name, text) if good else Finding(name, level, text, remedy)


async def examine(checks: Sequence[Check], tell: Callable[[str], None]) -> list[Finding]:
    """Return all findings in the order of `checks`. `tell` is told which checks still run when they take long."""
    running = {asyncio.create_task(_bounded(check)): check for check in checks}
    until = time.monotonic() + TELL_AFTER_S
    while True:
        _, left = await asyncio.wait(running, timeout=max(0.0, until - time.monotonic()))
        if not left:
            break
        tell(f"still looking at: {', '.join(check.name for task, check in running.items() if task in left)}")
        until += TELL_AFTER_S
    return [finding for task in running for finding in task.result()]


async def _bounded(check: Check) -> list[Finding]:
    try:
        async with asyncio.timeout(check.limit_s):
            return await check.look()
    except TimeoutError:
        return [warning(check.name, f"no answer within {check.limit_s:g} s", "run the command again; then see why")]
    except RolloutError as error:
        return [fault(check.name, error.message, "as it says")]
