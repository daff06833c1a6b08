"""Seeds of the simulated cluster: every invariant holds, every fault fires, every transition is taken, and a seed
replays byte for byte."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sim_scenario import dump, generate, load
from simulate import Report, simulate

CHUNK = 20
FAST = 100
SLOW = 10_000
STEPS, FAULTS, WORKERS, COORDINATORS = 400, 5, 3, 2


def check(report: Report) -> None:
    assert report.steps >= STEPS
    scenario = generate(report.seed)
    assert len(scenario.workers) >= WORKERS and len(scenario.coordinators) >= COORDINATORS
    assert sum(line.startswith("fault ") for line in report.milestones) >= FAULTS


@pytest.mark.parametrize("first", range(0, FAST, CHUNK))
def test_seeds(first: int) -> None:
    for seed in range(first, first + CHUNK):
        check(simulate(seed))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(FAST, SLOW, 500))
def test_many_seeds(first: int) -> None:
    for seed in range(first, min(first + 500, SLOW)):
        check(simulate(seed))


def test_a_seed_replays_byte_for_byte() -> None:
    first = simulate(7, trace=True)
    simulate(8)
    again = simulate(7, trace=True)
    assert first.trace == again.trace and first.digest == again.digest


def test_a_seed_replays_in_another_process() -> None:
    here = simulate(11).digest
    code = "import simulate; print(simulate.simulate(11).digest)"
    for hash_seed in ("1", "2"):
        told = subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )  # fmt: skip
        assert told.stdout.strip() == here


def test_a_scenario_is_written_and_read() -> None:
    for seed in range(20):
        assert load(dump(generate(seed))) == generate(seed)
