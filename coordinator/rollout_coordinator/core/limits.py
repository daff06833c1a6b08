"""Limits on what a run may use or suffer before the rest of its items is skipped."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the policy `skip_rest`; 0, or no codes, means no limit."""

    units_in: int = 0
    units_out: int = 0
    wall_ms: int = 0
    codes: frozenset[str] = frozenset()
    min_percent: int = 0  # of items that must not fail with one of the codes
    after: int = 1  # items before that is looked at
    named: tuple[str, str] = ("units in", "units out")  # for people; "$" are millionths of a dollar
    used: tuple[int, int] = (0, 0)  # units in and out, before the run
    used_ms: int = 0  # running time before the run
    items: str = "items"  # for people, as the next two
    fault: str = ""  # what a failure with one of the codes is
    rate: str = ""  # the setting that is meant by `min_percent`
