"""Workers that cannot start what they host: some for a while, some for good."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from sim_executors import EXECUTORS
from sim_scenario import Fault, Scenario

START_ERROR = "start_error"


def fails_starts(seed: int) -> bool:
    return seed % 5 == 3


def fail_starts(scenario: Scenario, random: Random) -> Scenario:
    """Mostly one worker; now and then all of them, so that runs end with it."""
    executor = random.choice(tuple(EXECUTORS))
    all_of_them = random.random() < 0.25
    workers = [
        replace(w, cannot_start=(executor,)) if executor in w.executors and (all_of_them or n == 0) else w
        for n, w in enumerate(scenario.workers)
    ]
    faults = list(scenario.faults)
    for worker in random.sample(workers, random.randint(1, len(workers))):
        at, seconds = round(random.uniform(0.0, 5.0), 3), round(random.uniform(0.5, 8.0), 3)
        faults.append(Fault("start_fails", at, worker.name, seconds=seconds, amount=random.randint(0, 1)))
    return replace(scenario, workers=tuple(workers), faults=tuple(sorted(faults, key=lambda fault: fault.at)))
