"""Effect sizes, and the difference of two groups that are not paired. Differences are B minus A."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from rollout.workloads.job.intervals import CONFIDENCE, Estimate, clustered_error, estimate, unvaried_difference
from rollout.workloads.job.student import t_cdf, t_quantile


def cohens_h(rate_a: float, rate_b: float) -> float:
    """Return 2·asin(√B) - 2·asin(√A) of two rates: 0.2 is small, 0.5 medium, 0.8 large (Cohen 1988, Statistical Power
    Analysis for the Behavioral Sciences, 2nd ed., section 6.2). Raises ValueError if a rate is not within [0, 1]."""
    if not 0 <= rate_a <= 1 or not 0 <= rate_b <= 1:
        raise ValueError(f"rates lie within [0, 1], got {rate_a} and {rate_b}")
    return 2 * math.asin(math.sqrt(rate_b)) - 2 * math.asin(math.sqrt(rate_a))


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference. `low`, `high` and `p_value` are None if a group has fewer than two clusters, or if neither varies
    and values are not within [0, 1]."""

    value: float
    low: float | None
    high: float | None
    p_value: float | None


def unpaired_difference(
    a: Mapping[Hashable, Sequence[float]], b: Mapping[Hashable, Sequence[float]], confidence: float = CONFIDENCE
) -> Difference:
    """Return the difference of two means of values by cluster: Welch's t interval and test, with the cluster-robust
    standard error of each mean and its clusters minus one as degrees of freedom (Welch 1947, Biometrika 34, 28). With
    one value in each cluster it is Welch's test. If neither group varies: the interval of `unvaried_difference`, and
    the exact permutation test of the clusters (Fisher 1935, The Design of Experiments, section 21), where no other
    split of them differs as much except, possibly, the mirrored one. Raises ValueError if a group has no value."""
    one, other = estimate(a, differences=True), estimate(b, differences=True)
    if one is None or other is None:
        raise ValueError("a group without values has no mean")
    value = other.mean - one.mean
    if one.tasks < 2 or other.tasks < 2:
        return Difference(value, None, None, None)
    squares = [
        (clustered_error([list(values) for values in group.values() if values], mean) ** 2, clusters - 1)
        for group, mean, clusters in ((a, one.mean, one.tasks), (b, other.mean, other.tasks))
    ]
    square = math.fsum(each for each, _ in squares)
    if square == 0:
        return _unvaried(one, other, rates=all(0 <= x <= 1 for group in (a, b) for xs in group.values() for x in xs))
    if not math.isfinite(square):
        return Difference(value, None, None, None)
    df = square**2 / math.fsum(each**2 / free for each, free in squares)
    error = math.sqrt(square)
    half = t_quantile((1 + confidence) / 2, df) * error
    return Difference(value, value - half, value + half, 2 * t_cdf(-abs(value) / error, df))


def _unvaried(a: Estimate, b: Estimate, *, rates: bool) -> Difference:
    value = b.mean - a.mean
    p_value = 1.0 if value == 0 else min(1.0, 2 / math.comb(a.tasks + b.tasks, a.tasks))
    low, high = (unvaried_difference(a.mean, b.mean, a.tasks, b.tasks) if rates else None) or (None, None)
    return Difference(value, low, high, p_value)
