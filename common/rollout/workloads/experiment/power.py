"""The smallest difference that an experiment of a given size can detect, and the size needed for a given difference.

Both are of the pass rates of two variants. Paired: Connor, "Sample size for testing differences in proportions for the
paired-sample design", Biometrics 43 (1987) 207-211, with the discordance of two independent variants at a pass rate of
one half, which is the largest there is without negative dependence. Unpaired: Fleiss, Statistical Methods for Rates and
Proportions, 2nd ed. (1981), eq. 3.14, at pass rates around one half. Replications of one task are alike: n tasks of r
trials count as n r / (1 + (r - 1) rho) tasks (Kish, Survey Sampling, 1965), rho = 0.5.
"""

from __future__ import annotations

from math import ceil, sqrt
from statistics import NormalDist

ALPHA = 0.05
POWER = 0.8
RHO = 0.5
_DISCORDANT = 0.5
_EXACT = 1e-6


def tasks_for(effect: float, *, paired: bool, replications: int = 1, alpha: float = ALPHA, power: float = POWER) -> int:
    """Return the number of tasks (of each variant, if unpaired) with which a difference in pass rates of `effect`, in
    (0, 1], is found with probability `power` by a two-sided test at level `alpha`."""
    if not 0 < effect <= 1:
        raise ValueError(f"an effect is above 0 and at most 1, not {effect:g}")
    units = _paired(effect, alpha, power) if paired else _unpaired(effect, alpha, power)
    return max(1, ceil(units / _weight(replications) - _EXACT))


def detectable(tasks: int, *, paired: bool, replications: int = 1, alpha: float = ALPHA, power: float = POWER) -> float:
    """Return, by bisection, the smallest effect for which `tasks` are enough, or 1.0 if there is none."""
    low, high = _EXACT, 1.0
    while high - low > _EXACT:
        middle = (low + high) / 2
        enough = tasks_for(middle, paired=paired, replications=replications, alpha=alpha, power=power) <= tasks
        low, high = (low, middle) if enough else (middle, high)
    return high


def _weight(replications: int) -> float:
    """Return how many independent tasks one task with this many replications is worth."""
    return replications / (1 + (replications - 1) * RHO)


def _quantiles(alpha: float, power: float) -> tuple[float, float]:
    normal = NormalDist()
    return normal.inv_cdf(1 - alpha / 2), normal.inv_cdf(power)


def _paired(effect: float, alpha: float, power: float) -> float:
    z_alpha, z_beta = _quantiles(alpha, power)
    discordant = max(_DISCORDANT, effect)  # a difference needs as many that disagree
    return (z_alpha * sqrt(discordant) + z_beta * sqrt(discordant - effect**2)) ** 2 / effect**2


def _unpaired(effect: float, alpha: float, power: float) -> float:
    z_alpha, z_beta = _quantiles(alpha, power)
    first, second = 0.5 - effect / 2, 0.5 + effect / 2
    spread = first * (1 - first) + second * (1 - second)
    return (z_alpha * sqrt(0.5) + z_beta * sqrt(spread)) ** 2 / effect**2
