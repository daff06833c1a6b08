"""Exclusive items never overlap: situations that the seeds do not meet, or only by chance."""

from __future__ import annotations

from collections import Counter

import pytest
from sim_aimed import Story, aim, healed_fence, quarantined_holder
from sim_generate import generate
from simulate import run


def tell(story: Story, seeds: range) -> Counter[str]:
    """Runs every seed under the story; what happened in how many of them."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        report = run(aim(generate(seed), story))
        seen.update(report.faults.keys() | report.events.keys())
    return seen


def test_a_quarantined_worker_fences_itself_before_its_exclusive_items_run_elsewhere() -> None:
    seen = tell(quarantined_holder, range(12))
    assert seen["worker_quarantined"] >= 6 and seen["worker_fenced"] >= 6


def test_what_a_fenced_worker_killed_has_ended_before_it_runs_elsewhere() -> None:
    seen = tell(healed_fence, range(12))
    assert seen["worker_fenced"] >= 10 and seen["worker_unfenced"] >= 10


@pytest.mark.slow
def test_many_fenced_workers_that_come_back() -> None:
    assert tell(healed_fence, range(12, 300))["worker_unfenced"] >= 250


@pytest.mark.slow
def test_many_quarantined_workers() -> None:
    assert tell(quarantined_holder, range(12, 300))["worker_quarantined"] >= 150
