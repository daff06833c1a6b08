"""Leaders that die while they recover, one after the other: every invariant holds and every run ends."""

from __future__ import annotations

from collections import Counter

import pytest
from sim_aimed import aim, leaders_die_in_recovery
from sim_generate import generate
from simulate import run


def _struck(seeds: range) -> Counter[int]:
    """How many leaders died while they waited for a worker that holds something, and in how many seeds."""
    times: Counter[int] = Counter()
    for seed in seeds:
        times[run(aim(generate(seed), leaders_die_in_recovery)).faults["crash_in_recovery"]] += 1
    return times


def test_leaders_die_in_recovery() -> None:
    times = _struck(range(30))
    assert times[1] and times[2] and sum(n for deaths, n in times.items() if deaths) >= 20


@pytest.mark.slow
@pytest.mark.parametrize("first", range(30, 1030, 250))
def test_many_leaders_die_in_recovery(first: int) -> None:
    assert sum(deaths * n for deaths, n in _struck(range(first, first + 250)).items()) >= 250
