"""Wall clocks that jump a day ahead and come back, while items wait to be tried again."""

from __future__ import annotations

import pytest
from sim_aimed import aim, clocks_jump
from sim_generate import generate
from simulate import run


def jumped(seeds: range) -> int:
    """In how many seeds a clock jumped and a leader took over after it. Every run of every seed ends."""
    reports = [run(aim(generate(seed), clocks_jump)) for seed in seeds]
    assert all(report.faults["clock_jump"] >= 5 for report in reports)
    return sum(report.faults["crash"] > 0 for report in reports)


def test_clocks_that_jump_a_day_and_come_back_hold_no_run_up() -> None:
    assert jumped(range(12)) >= 6


@pytest.mark.slow
def test_many_clocks_that_jump() -> None:
    assert jumped(range(12, 300)) >= 150
