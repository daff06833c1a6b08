"""Corrects p-values for several comparisons: the adjusted values are compared with the level for a single one."""

from __future__ import annotations

from collections.abc import Sequence


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values so that the chance of any false positive stays at the level (Holm 1979, Scand. J. Stat. 6,
    65)."""
    count, highest = len(p_values), 0.0
    adjusted = [0.0] * count
    for rank, index in enumerate(sorted(range(count), key=lambda one: p_values[one])):
        highest = max(highest, min(1.0, (count - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values so that the expected share of false ones among the positives stays at the level (Benjamini and
    Hochberg 1995, J. R. Stat. Soc. B 57, 289)."""
    count, lowest = len(p_values), 1.0
    adjusted = [0.0] * count
    for rank, index in enumerate(sorted(range(count), key=lambda one: -p_values[one])):
        lowest = min(lowest, p_values[index] * count / (count - rank))
        adjusted[index] = lowest
    return adjusted
