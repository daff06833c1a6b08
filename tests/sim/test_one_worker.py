"""Items of a run that asks for it are on one worker at a time, whatever dies: the checker looks after every step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sim_generate import generate, mixed
from simulate import run


def tell(seeds: range) -> int:
    """How many of the seeds lost a worker or a leader."""
    struck = 0
    for seed in (seed for seed in seeds if not mixed(seed)):
        scenario = generate(seed)
        runs = tuple(
            replace(plan, one_worker=True) if not any(how.children for how, _ in plan.items) else plan
            for plan in scenario.runs
        )
        report = run(replace(scenario, runs=runs))
        struck += bool({"worker_failed", "lease_acquired"} & report.events.keys())
    return struck


def test_no_two_workers_have_items_of_it() -> None:
    assert tell(range(25)) >= 10


@pytest.mark.slow
def test_many_seeds() -> None:
    assert tell(range(25, 500)) >= 150
