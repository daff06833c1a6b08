"""Chooses the rows of a step: a pure function of the seed and the number of the step.

It has no state, so a run continues from any step, on any machine, with the same rows. numpy and torch do not guarantee
that their shuffles stay the same between versions; this one does.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_INCREMENT, _FIRST, _SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply splitmix64 (Steele, Lea and Flood 2014), a bijection of 64-bit numbers that looks random."""
    with np.errstate(over="ignore"):
        z = values + _INCREMENT
        z = (z ^ (z >> np.uint64(30))) * _FIRST
        z = (z ^ (z >> np.uint64(27))) * _SECOND
        return z ^ (z >> np.uint64(31))


@lru_cache(maxsize=2)
def order(rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return (rows,): the rows of an epoch in training order."""
    key = _mixed(_mixed(np.array([seed], np.uint64)) ^ np.uint64(epoch))
    # A bijection of the indices: no two are equal, so that sorting by it is an order without ties.
    return np.argsort(_mixed(np.arange(rows, dtype=np.uint64) ^ key), kind="stable")


def step_rows(rows: int, seed: int, step: int, batch: int, total: int) -> NDArray[np.int64]:
    """Return the rows of step `step`, counted from 0: `batch` of them, from where the previous step ended, epoch after
    epoch.

    `total` is the number of rows in all steps, so the last step may be smaller.
    """
    first, last = step * batch, min((step + 1) * batch, total)
    parts: list[NDArray[np.int64]] = []
    while first < last:
        epoch, at = divmod(first, rows)
        count = min(last - first, rows - at)
        parts.append(order(rows, seed, epoch)[at : at + count])
        first += count
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
