"""Checks of a provider's account. Independent checks run concurrently and are reported in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from rollout.model.errors import RolloutError

NAMES = (
    "reachability",
    "auth",
    "object_store",
    "queue",
    "secret_store",
    "compute_hint",
    "content_id_roundtrip",
)
"""Names of the checks, in the order in which they are reported."""


@dataclass(frozen=True, slots=True)
class Passed:
    """Result of a check that passed. `detail` is what was found, for people; `advice` is what should still be
    mended."""

    detail: str = ""
    advice: tuple[str, ...] = ()


Probe = Callable[[], Awaitable[Passed]]


@dataclass(frozen=True, slots=True)
class Check:
    """One check. `probe` raises RolloutError with the failure and its remedy. `service` is the service of the provider
    that it asks, or empty."""

    name: str
    probe: Probe
    service: str = ""
    limit_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    latency_ms: int
    error: str = ""
    detail: str = ""
    advice: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.error


@dataclass(slots=True)
class Reached:
    """Reason why a service cannot be reached, by its name. The first check fills it."""

    failed: dict[str, str] = field(default_factory=dict[str, str])


async def run_checks(checks: Sequence[Check], reached: Reached, tell: Callable[[Outcome], None]) -> list[Outcome]:
    """Run reachability, then auth, then all others concurrently.

    A check fails without being tried if its service cannot be reached or credentials are missing. `tell` is called for
    each outcome, in the order of `checks`.
    """
    found: list[Outcome] = []
    first = [check for check in checks if check.name in ("reachability", "auth")]
    for check in first:
        outcome = await _run(check, _why_not(check, reached, None))
        found.append(outcome)
        tell(outcome)
    refused = next((one for one in found if one.name == "auth" and not one.ok), None)
    rest = [check for check in checks if check not in first]
    running = [asyncio.create_task(_run(check, _why_not(check, reached, refused))) for check in rest]
    try:
        for task in running:
            # To await the task itself would cancel that check alone, which may be just about to end.
            await asyncio.wait([task])
            outcome = task.result()
            found.append(outcome)
            tell(outcome)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)  # each tidies up after itself
    return found


def _why_not(check: Check, reached: Reached, refused: Outcome | None) -> str:
    if check.service in reached.failed:
        return f"not tried: {check.service} cannot be reached (see reachability)"
    if check.service and refused is not None:
        return "not tried: there are no credentials that work (see auth)"
    return ""


async def _run(check: Check, why_not: str) -> Outcome:
    if why_not:
        return Outcome(check.name, 0, why_not)
    began = time.perf_counter()
    try:
        async with asyncio.timeout(check.limit_s):
            passed = await check.probe()
    except TimeoutError:
        text = f"did not end within {check.limit_s:g} s: see how the network fares, and whether the service throttles"
        return Outcome(check.name, _ms(began), text)
    except RolloutError as error:
        return Outcome(check.name, _ms(began), error.message)
    return Outcome(check.name, _ms(began), detail=passed.detail, advice=passed.advice)


def _ms(began: float) -> int:
    return round((time.perf_counter() - began) * 1000)
