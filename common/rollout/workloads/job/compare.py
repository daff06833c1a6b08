"""Compares two jobs or agents on the same tasks: which is better, by how much, and whether that may be chance.

They are compared task by task, because tasks differ far more than agents do: a difference of paired means has a much
smaller variance than two separate means (Miller 2024, arXiv:2411.00640, section 4.2). Differences are B minus A.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, product
from statistics import NormalDist
from typing import Literal

from rollout.model.errors import InputError
from rollout.workloads.job.averages import mean
from rollout.workloads.job.intervals import CONFIDENCE, estimate, unvaried_difference
from rollout.workloads.job.pass_at_k import PASS

TaskKey = tuple[str, str]
"""(dataset, task)"""
Test = Literal["mcnemar_mid_p", "sign_flip_exact", "sign_flip_sampled"]
EXACT_MAX = 14
"""For up to this many differing tasks, all 2^n assignments of signs are tried."""
DRAWS = 20_000
_DRAWS_MIN = 2_000
_FLIPS_MAX = 50_000_000
_SEED = 20_240_229
_TIE = 1e-12
_AS_BITS = bytes.maketrans(b"01", b"\0\1")


@dataclass(frozen=True, slots=True)
class Flip:
    """A task that one passes in most attempts, and the other does not. Rates are of its scored attempts."""

    dataset: str
    task: str
    a_pass_rate: float
    b_pass_rate: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of the `tasks` that were scored in both; `only_a` and `only_b` were scored in one alone. The means
    and the difference count each task once, however often it was tried.

    `low` and `high` are None for fewer than two tasks, or without variation, as when all tasks differ alike in scores
    outside [0, 1]. `p_exact` is that of McNemar's exact test. `discordant` counts the tasks that only A, and only B,
    solved, for McNemar's tests.
    """

    agent_a: str
    agent_b: str
    tasks: int
    only_a: int
    only_b: int
    mean_a: float
    mean_b: float
    difference: float
    low: float | None
    high: float | None
    p_value: float
    test: Test
    p_exact: float | None
    discordant: tuple[int, int] | None
    gained: tuple[Flip, ...]
    lost: tuple[Flip, ...]


def compare(
    agent_a: str,
    a: Mapping[TaskKey, Sequence[float]],
    agent_b: str,
    b: Mapping[TaskKey, Sequence[float]],
) -> Comparison:
    """Compare scores by task (`aggregate.scores_by_task`). Raises InputError if no task is in both.

    With one attempt at each task and rewards of 0 and 1, or several attempts that all agree: McNemar's mid-p test, and
    the interval of Bonett and Price. Otherwise a sign-flip test of the mean differences of the tasks, and a t interval
    of these; where all differ alike, that of `unvaried_difference`.
    """
    tasks = [task for task in a if a[task] and b.get(task)]
    if not tasks:
        both = agent_a if agent_a == agent_b else f"{agent_a} and {agent_b}"
        counts = [sum(map(bool, scores.values())) for scores in (a, b)]
        raise InputError(f"{both}: no task was scored in both (in A {counts[0]:,} were, in B {counts[1]:,})")
    means_a = [mean(a[task]) for task in tasks]
    means_b = [mean(b[task]) for task in tasks]
    differences = [second - first for first, second in zip(means_a, means_b, strict=True)]
    test: Test
    p_exact, discordant = None, None
    if all(set(scores[task]) in ({0.0}, {1.0}) for scores in (a, b) for task in tasks):
        discordant = sum(one < 0 for one in differences), sum(one > 0 for one in differences)
        p_exact, p_value = mcnemar(*discordant)
        test = "mcnemar_mid_p"
        low, high = bonett_price(*discordant, len(tasks)) if len(tasks) > 1 else (None, None)
    else:
        p_value, exact = sign_flip(differences)
        test = "sign_flip_exact" if exact else "sign_flip_sampled"
        rates = all(0 <= score <= 1 for scores in (a, b) for task in tasks for score in scores[task])
        low, high = _t_interval(differences, 1.0 if rates else math.inf)
        if low is None and rates:
            low, high = unvaried_difference(mean(means_a), mean(means_b), len(tasks), len(tasks)) or (None, None)
    flips = [flip for task in tasks if (flip := _flip(task, a[task], b[task]))]
    return Comparison(
        agent_a=agent_a,
        agent_b=agent_b,
        tasks=len(tasks),
        only_a=sum(bool(scores) and not b.get(task) for task, scores in a.items()),
        only_b=sum(bool(scores) and not a.get(task) for task, scores in b.items()),
        mean_a=mean(means_a),
        mean_b=mean(means_b),
        difference=mean(differences),
        low=low,
        high=high,
        p_value=p_value,
        test=test,
        p_exact=p_exact,
        discordant=discordant,
        gained=tuple(flip for flip in flips if flip.b_pass_rate > flip.a_pass_rate),
        lost=tuple(flip for flip in flips if flip.b_pass_rate < flip.a_pass_rate),
    )


def _t_interval(differences: Sequence[float], most: float) -> tuple[float | None, float | None]:
    """Return a t interval of their mean, within `most` of 0, or (None, None) if there are fewer than two or all are
    equal."""
    size = max(map(abs, differences))
    if max(differences) - min(differences) <= _TIE * size:
        return None, None
    found = estimate({index: [one] for index, one in enumerate(differences)}, differences=True)
    if found is None or found.low is None or found.high is None:
        return None, None
    return max(-most, found.low), min(most, found.high)


def _flip(task: TaskKey, a: Sequence[float], b: Sequence[float]) -> Flip | None:
    rate_a, rate_b = (mean([float(value >= PASS) for value in scores]) for scores in (a, b))
    return Flip(*task, rate_a, rate_b) if (rate_a > 0.5) != (rate_b > 0.5) else None


def mcnemar(only_a: int, only_b: int) -> tuple[float, float]:
    """Return (exact, mid-p) two-sided p-values of McNemar's test, for the numbers of pairs in which one alone
    succeeded.

    The exact conditional test is conservative, the asymptotic one unsafe with few pairs; the mid-p value is neither
    (Fagerland, Lydersen and Laake 2013, BMC Med. Res. Methodol. 13, 91, equations 3 and 5).
    """
    pairs, fewer = only_a + only_b, min(only_a, only_b)
    point = math.comb(pairs, fewer) / 2**pairs
    if only_a == only_b:
        return 1.0, 1 - point / 2 if pairs else 1.0
    tail = sum(math.comb(pairs, k) for k in range(fewer + 1)) / 2**pairs
    return min(1.0, 2 * tail), min(1.0, 2 * tail - point)


def bonett_price(only_a: int, only_b: int, pairs: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the interval of a difference of paired proportions, B minus A, by Bonett and Price 2012 (J. Educ. Behav.
    Stat. 37, 479): Wald's with one more pair of each discordant kind. It keeps its coverage where Wald's has width 0.
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    a, b = (only_a + 1) / (pairs + 2), (only_b + 1) / (pairs + 2)
    half = z * math.sqrt((a + b - (b - a) ** 2) / (pairs + 2))
    return max(-1.0, b - a - half), min(1.0, b - a + half)


def sign_flip(differences: Sequence[float]) -> tuple[float, bool]:
    """Return (two-sided p-value, whether it is exact) of the hypothesis that each difference might as well have had the
    other sign.

    All signs are tried for up to EXACT_MAX differences that are not 0. For more, up to DRAWS are drawn with a fixed
    seed, and p = (1 + those as large) / (1 + draws), which is never 0 (Phipson and Smyth 2010, Stat. Appl. Genet. Mol.
    Biol. 9, 39).
    """
    sizes = [abs(one) for one in differences if one]
    scale = max(sizes, default=1.0)
    sizes = [size / scale for size in sizes]  # so that no sum overflows
    limit = abs(math.fsum(one / scale for one in differences)) - _TIE * len(sizes)
    if len(sizes) <= EXACT_MAX:
        sums = [abs(math.fsum(s * size for s, size in zip(signs, sizes, strict=True))) for signs in _signs(len(sizes))]
        return sum(one >= limit for one in sums) / len(sums), True
    larger, draws = _drawn(sizes, limit)
    return (1 + larger) / (1 + draws), False


def _drawn(sizes: Sequence[float], limit: float) -> tuple[int, int]:
    """Return in how many random assignments of signs the sum is at least `limit` from 0, and the number of assignments:
    DRAWS, or fewer for thousands of different sizes.

    Of equal sizes only the number of flips matters, which one random integer gives: rates of a few attempts take few
    values, and thousands of tasks cost no more than these.
    """
    generator = random.Random(_SEED)
    total = math.fsum(sizes)
    counts = Counter(sizes)
    draws = min(DRAWS, max(_DRAWS_MIN, _FLIPS_MAX // len(counts)))
    repeated = [(size, count) for size, count in counts.items() if count > 1]
    single = [size for size, count in counts.items() if count == 1]
    larger = 0
    for _ in range(draws):
        flipped = sum(size * generator.getrandbits(count).bit_count() for size, count in repeated)
        if single:
            bits = f"{generator.getrandbits(len(single)):0{len(single)}b}"
            flipped += sum(compress(single, bits.encode().translate(_AS_BITS)))
        larger += abs(total - 2 * flipped) >= limit
    return larger, draws


def _signs(count: int) -> list[tuple[int, ...]]:
    return list(product((1, -1), repeat=count))
