"""pass@k: the probability that at least one of k attempts at a task passes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from rollout.workloads.job.intervals import Estimate, estimate

PASS = 1.0
"""The reward from which a trial passes."""
EVERY_K_TO = 100


@dataclass(frozen=True, slots=True)
class PassAtK:
    """`value` is the mean over the tasks that were tried at least `k` times; `value.tasks` is their number."""

    k: int
    value: Estimate


@cache
def pass_at_k(tries: int, passed: int, k: int) -> float:
    """Return the unbiased estimate 1 - C(n-c, k) / C(n, k) for `k` attempts at a task, from n `tries` of which c
    `passed` (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", arXiv:2107.03374, equation 1).

    Raises ValueError unless 0 <= passed <= tries and 1 <= k <= tries: with fewer tries than k there is no unbiased
    estimate.
    """
    if not 0 <= passed <= tries or not 1 <= k <= tries:
        raise ValueError(f"of {tries} tries {passed} passed: there is no pass@{k}")
    return 1 - math.comb(tries - passed, k) / math.comb(tries, k)


def _sizes(most: int) -> list[int]:
    every = list(range(1, min(most, EVERY_K_TO) + 1))
    return every + [1 << power for power in range(EVERY_K_TO.bit_length(), most.bit_length()) if 1 << power <= most]


def pass_at_each_k(groups: Mapping[Hashable, Sequence[float]]) -> list[PassAtK]:
    """Return pass@k for k up to the most scored attempts at one task: each k to 100, then powers of two. `groups` are
    rewards by task.

    A task with fewer attempts than k, for example after a failure of the infrastructure, is left out, and never counted
    as failed.
    """
    counts = {task: (len(rewards), sum(reward >= PASS for reward in rewards)) for task, rewards in groups.items()}
    found = list[PassAtK]()
    for k in _sizes(max((tries for tries, _ in counts.values()), default=0)):
        values = {task: [pass_at_k(tries, passed, k)] for task, (tries, passed) in counts.items() if tries >= k}
        if k == 1 and len({tries for tries, _ in counts.values()}) == 1:  # the pass rate: the same interval, too
            values = {task: [float(reward >= PASS) for reward in rewards] for task, rewards in groups.items()}
        value = estimate(values)
        if value is not None:
            found.append(PassAtK(k, value))
    return found
