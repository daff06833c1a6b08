"""Means of rewards, which may have any finite size."""

from __future__ import annotations

import math
from collections.abc import Sequence


def mean(values: Sequence[float]) -> float:
    """Return the mean of at least one value."""
    try:
        return math.fsum(values) / len(values)
    except OverflowError:  # the sum is beyond what a float holds, the mean is not
        return math.fsum(value / len(values) for value in values)
