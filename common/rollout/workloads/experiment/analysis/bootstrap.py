"""The cluster bootstrap: intervals of what has no formula, such as the ratio of two costs.

Whole tasks are drawn, with all their trials of both variants. Trials of one task are alike, so that to draw single
trials takes them for independent, which gives intervals that are far too narrow: the tests show it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from rollout.workloads.job.intervals import CONFIDENCE

Cluster = TypeVar("Cluster")
DRAWS = 2_000
_SEED = 20_240_229
DRAWN_MAX = 20_000_000
"""Clusters drawn at most in all: fewer draws of very many clusters are as good, and take seconds, not minutes."""


def cluster_bootstrap(
    clusters: Sequence[Cluster],
    statistic: Callable[[Sequence[Cluster]], float],
    *,
    confidence: float = CONFIDENCE,
    draws: int = DRAWS,
    seed: int = _SEED,
) -> tuple[float, float] | None:
    """The percentile interval of `statistic` when `clusters` are drawn with replacement (Cameron, Gelbach and Miller
    2008, Rev. Econ. Stat. 90, 414, section III). None: fewer than two clusters, or the statistic is not finite in more
    than 1 % of the draws. The same input gives the same interval.

    With few clusters it is too narrow by about the factor sqrt((G - 1)/G), and it has no t quantile: the differences of
    means have a t interval instead.
    """
    if len(clusters) < 2:
        return None
    generator = random.Random(seed)
    draws = max(200, min(draws, DRAWN_MAX // len(clusters)))
    found = [statistic(generator.choices(clusters, k=len(clusters))) for _ in range(draws)]
    values = sorted(value for value in found if math.isfinite(value))
    if len(values) < 0.99 * draws:
        return None
    tail = (1 - confidence) / 2
    return _quantile(values, tail), _quantile(values, 1 - tail)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between the two nearest (Hyndman and Fan 1996, Am. Stat. 50, 361, definition 7)."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
