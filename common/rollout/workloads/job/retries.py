"""Decides which trials are tried again, and when."""

from __future__ import annotations

from collections.abc import Mapping

from rollout.workloads.job.config import RetrySection
from rollout.workloads.job.errors import PolicyOverride, policy_of


def is_retried(error_type: str, retry: RetrySection, overrides: Mapping[str, PolicyOverride]) -> bool:
    """Return whether it is retried. `exclude` has precedence; `include`, if not empty, replaces the table of errors."""
    if error_type in retry.exclude:
        return False
    return error_type in retry.include if retry.include else policy_of(error_type, overrides).retried


def delay_ms(retry: RetrySection, tries: int) -> int:
    """Return the delay after the try `tries`, counted from 1: initial · multiplier^(tries - 1), at most the maximum."""
    try:
        delay = retry.initial_delay_ms * retry.multiplier ** (tries - 1)
    except OverflowError:
        return retry.max_delay_ms
    return round(min(delay, retry.max_delay_ms))
