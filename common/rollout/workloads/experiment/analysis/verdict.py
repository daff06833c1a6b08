"""Derives the verdict on a variant from an interval and a p-value: better, worse, tied, or inconclusive."""

from __future__ import annotations

from typing import Literal

from rollout.workloads.experiment.contracts import Direction

Verdict = Literal["better", "worse", "tied", "inconclusive"]
Interval = tuple[float, float]
LEVEL = 0.05


def verdict(
    difference: float,
    interval: Interval | None,
    p_value: float | None,
    *,
    margin: float | None = None,
    direction: Direction = "maximize",
) -> Verdict:
    """Return the verdict. `difference` is the variant's mean minus the baseline's, `p_value` is corrected.

    tied: the whole interval lies within `margin` of 0, whatever the p-value: the difference is too small to matter
    (Schuirmann 1987, J. Pharmacokinet. Biopharm. 15, 657; his test at level 0.05 has a 90 % interval, ours of 95 % is
    stricter). better, worse: 0 is outside the interval and the p-value is at most 0.05. Without an interval, as when
    all tasks differ alike, the p-value decides alone.
    """
    if margin is not None and interval is not None and -margin <= interval[0] and interval[1] <= margin:
        return "tied"
    if p_value is None or p_value > LEVEL or difference == 0:
        return "inconclusive"
    if interval is not None and interval[0] <= 0 <= interval[1]:
        return "inconclusive"
    return "better" if (difference > 0) == (direction == "maximize") else "worse"


def non_inferior(interval: Interval | None, margin: float | None, direction: Direction = "maximize") -> bool | None:
    """Return whether the variant is at most `margin` worse than the baseline, by the worse end of the interval (CPMP
    2000, Points to consider on switching between superiority and non-inferiority, section III.2). Returns None without
    a margin or an interval."""
    if margin is None or interval is None:
        return None
    return interval[0] > -margin if direction == "maximize" else interval[1] < margin
