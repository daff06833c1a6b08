"""Retries: which failures of a service are worth one, when, and what the last one reports."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Literal, TypeVar

import structlog

from rollout.model.errors import (
    ConfigError,
    ConflictError,
    InputError,
    NotFoundError,
    RolloutError,
    StorageUnavailableError,
)

log = structlog.get_logger()

T = TypeVar("T")
Kind = Literal["throttled", "transient", "denied", "credentials", "missing", "conflict", "region", "invalid"]

FIRST_S = {"transient": 0.1, "throttled": 0.5}
"""Maximum seconds before the second attempt; a service that throttles needs more than 0.1 s."""
LONGEST_S = 20.0
_ERRORS: dict[Kind, type[RolloutError]] = {
    "denied": ConfigError,
    "credentials": ConfigError,
    "missing": NotFoundError,
    "conflict": ConflictError,
    "region": ConfigError,
    "invalid": InputError,
}


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure of a call.

    `said` is the service's message, for people. `remedy` says what to do, with the permission or the configuration key.
    `retry_after_s` is the wait that the service asks for. `raises` replaces the error of the kind. The raised error has
    the kind as `context["failure"]`.
    """

    kind: Kind
    said: str
    remedy: str = ""
    retry_after_s: float | None = None
    raises: type[RolloutError] | None = None

    @property
    def again(self) -> bool:
        return self.kind in ("throttled", "transient")

    def error(self, what: str, unavailable: type[RolloutError] = StorageUnavailableError) -> RolloutError:
        kind = self.raises or _ERRORS.get(self.kind, unavailable)
        remedy = f"; {self.remedy}" if self.remedy else ""
        return kind(f"{what}: {self.said}{remedy}", failure=self.kind)


async def retrying(
    attempt: Callable[[], Awaitable[T]],
    classify: Callable[[BaseException], Failure | None],
    *,
    what: str,
    budget_s: float = 60.0,
    unavailable: type[RolloutError] = StorageUnavailableError,
) -> T:
    """Return what `attempt` returns, after retries of throttled and transient failures.

    The wait is random below a bound that doubles (full jitter:
    https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/), or what the service asks for, until
    `budget_s` after the first failure. `what` begins the message: "s3://bucket/key cannot be read". `unavailable` is
    raised when the budget is spent. Errors that `classify` does not know are raised as they are.
    """
    clock = asyncio.get_running_loop().time
    deadline: float | None = None
    tries = 0
    while True:
        try:
            return await attempt()
        except Exception as e:
            failure = classify(e)
            if failure is None:
                raise
            tries += 1
            now = clock()
            deadline = deadline or now + budget_s
            bound = min(LONGEST_S, FIRST_S.get(failure.kind, 0.0) * 2 ** min(tries - 1, 16))
            wait_s = max(failure.retry_after_s or 0.0, random.uniform(0, bound))
            if not failure.again or now + wait_s > deadline:
                error = failure.error(what, unavailable)
                if failure.again:
                    error.message += f" (tried {tries} {'time' if tries == 1 else 'times'})"
                raise error from e
            log.debug("cloud_call_again", what=what, said=failure.said, wait_s=round(wait_s, 3))
            await asyncio.sleep(wait_s)


def retry_after(value: str | None) -> float | None:
    """Return the seconds in either form of RFC 9110, section 10.2.3."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
