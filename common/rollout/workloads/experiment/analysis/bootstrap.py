"""The cluster bootstrap: intervals for statistics without a formula, such as the ratio of two costs.

Whole tasks are drawn, with all their trials of both variants. Trials of one task are alike. To draw single trials would
treat them as independent, and the intervals would be far too narrow, as the tests show.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from rollout.workloads.job.intervals import CONFIDENCE

DRAWS = 2_000
GROUPS_MAX = 1_000
_SEED = 20_240_229
_FINITE_SHARE = 0.99


def cluster_bootstrap(
    clusters: Sequence[Sequence[float]],
    statistic: Callable[[Sequence[float]], float],
    *,
    confidence: float = CONFIDENCE,
    draws: int = DRAWS,
    seed: int = _SEED,
) -> tuple[float, float] | None:
    """Return the percentile interval of `statistic` when clusters are drawn with replacement (Cameron, Gelbach and
    Miller 2008, Rev. Econ. Stat. 90, 414, section III).

    `clusters` has, for each, the sums that `statistic` is a function of, such as its cost and its number of trials;
    `statistic` gets their totals over the clusters drawn. More than GROUPS_MAX clusters are randomly combined into that
    many groups, which are drawn instead: the interval estimates the same, in bounded time (Wolter 2007, Introduction to
    Variance Estimation, 2nd ed., chapter 2).

    Returns None for fewer than two clusters, or if the statistic is not finite in more than 1 % of the draws. The same
    input gives the same interval. With few clusters it is too narrow by about the factor sqrt((G - 1)/G), and it has no
    t quantile: differences of means have a t interval instead.
    """
    generator = random.Random(seed)
    columns = _grouped(clusters, generator)
    if not columns or len(columns[0]) < 2:
        return None
    indices = range(len(columns[0]))
    found: list[float] = []
    for _ in range(draws):
        drawn = generator.choices(indices, k=len(indices))
        found.append(statistic([sum(map(column.__getitem__, drawn)) for column in columns]))
    values = sorted(value for value in found if math.isfinite(value))
    if len(values) < _FINITE_SHARE * draws:
        return None
    tail = (1 - confidence) / 2
    return _quantile(values, tail), _quantile(values, 1 - tail)


def _grouped(clusters: Sequence[Sequence[float]], generator: random.Random) -> list[list[float]]:
    """Return a list for each sum, with a value for each cluster or group of clusters."""
    columns = [list(column) for column in zip(*clusters, strict=True)]
    if len(clusters) <= GROUPS_MAX:
        return columns
    order = list(range(len(clusters)))
    generator.shuffle(order)
    return [
        [math.fsum(column[one] for one in order[first::GROUPS_MAX]) for first in range(GROUPS_MAX)]
        for column in columns
    ]


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Interpolate linearly between the two nearest values (Hyndman and Fan 1996, Am. Stat. 50, 361, definition 7)."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
