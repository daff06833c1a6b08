"""Student's t distribution, in plain Python.

The core installs without numpy and scipy, because two functions of one variable do not justify 100 MB on every host.
The tests compare them with scipy.
"""

from __future__ import annotations

import math
from functools import cache

_TINY = 1e-300
_ENOUGH = 1e-16
_TERMS_MAX = 10_000


def t_cdf(t: float, df: float) -> float:
    """Return P(T <= t) with `df` > 0 degrees of freedom (Abramowitz and Stegun, 26.7.1)."""
    if math.isinf(t):
        return 1.0 if t > 0 else 0.0
    tail = 0.5 * _incomplete_beta(df / 2, 0.5, df / (df + t * t), t * t / (df + t * t))
    return 1 - tail if t > 0 else tail


@cache
def t_quantile(p: float, df: float) -> float:
    """Return the t with P(T <= t) = p, for 0 < p < 1, to at least 9 digits. It is rarely called, so it uses
    bisection."""
    if not 0 < p < 1 or df <= 0:
        raise ValueError(f"p must lie between 0 and 1 and df above 0, got p={p}, df={df}")
    if p < 0.5:
        return -t_quantile(1 - p, df)
    low, high = 0.0, 1.0
    while t_cdf(high, df) < p:
        low, high = high, high * 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if t_cdf(middle, df) < p else (low, middle)
    return (low + high) / 2


def _incomplete_beta(a: float, b: float, x: float, rest: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22). `rest` is 1
    - x, passed separately because near 1 the difference would lose its digits."""
    if x <= 0:
        return 0.0
    if rest <= 0:
        return 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest)
    front = math.exp(log_front)
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(a, b, x) / a
    return 1 - front * _fraction(b, a, rest) / b


def _fraction(a: float, b: float, x: float) -> float:
    """Evaluate the fraction by the modified method of Lentz (Thompson and Barnett 1986, J. Comput. Phys. 64, 490)."""
    c, d = 1.0, 1 / (_away(1 - (a + b) * x / (a + 1)))
    value = d
    for m in range(1, _TERMS_MAX):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _away(1 + numerator * d)
            c = _away(1 + numerator / c)
            value *= d * c
        if abs(d * c - 1) < _ENOUGH:
            break
    return value


def _away(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
