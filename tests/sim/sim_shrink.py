"""A failing scenario made small: whatever can go while it still breaks the same invariant goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from sim_scenario import Command, RunPlan, Scenario
from simulate import Violation, run


def breaks(scenario: Scenario, invariant: str) -> bool:
    try:
        run(scenario, steps_min=0)
    except Violation as violation:
        return violation.invariant == invariant
    return False


def smaller(scenario: Scenario) -> Iterator[Scenario]:
    """One thing less, the largest first."""
    for n in range(len(scenario.runs)):
        runs = scenario.runs[:n] + scenario.runs[n + 1 :]
        if runs:
            idle = {plan.client for plan in scenario.runs} - {plan.client for plan in runs}  # they are not started
            faults = tuple(f for f in scenario.faults if f.node not in idle and f.peer not in idle)
            yield replace(scenario, runs=runs, faults=faults, commands=_renumbered(scenario.commands, n))
    for n in range(len(scenario.faults)):
        yield replace(scenario, faults=scenario.faults[:n] + scenario.faults[n + 1 :])
    for n in range(len(scenario.commands)):
        yield replace(scenario, commands=scenario.commands[:n] + scenario.commands[n + 1 :])
    for n, plan in enumerate(scenario.runs):
        for fewer in _fewer(plan):
            yield replace(scenario, runs=(*scenario.runs[:n], fewer, *scenario.runs[n + 1 :]))
    used = {fault.node for fault in scenario.faults} | {fault.peer for fault in scenario.faults}
    for n, worker in enumerate(scenario.workers):
        if len(scenario.workers) > 1 and n and worker.name not in used:
            yield replace(scenario, workers=scenario.workers[:n] + scenario.workers[n + 1 :])


def _fewer(plan: RunPlan) -> Iterator[RunPlan]:
    items = plan.items
    step = len(items) // 2
    while step:
        for at in range(0, len(items), step):
            rest = items[:at] + items[at + step :]
            if rest:
                yield replace(plan, items=rest)
        step //= 2


def _renumbered(commands: tuple[Command, ...], gone: int) -> tuple[Command, ...]:
    kept = [c for c in commands if c.run != gone]
    return tuple(replace(c, run=c.run - (c.run > gone)) for c in kept)


def shrink(scenario: Scenario, invariant: str, tell: Callable[[Scenario], None] = lambda scenario: None) -> Scenario:
    """The smallest found by taking away one thing at a time."""
    found = True
    while found:
        found = False
        for candidate in smaller(scenario):
            if breaks(candidate, invariant):
                scenario, found = candidate, True
                tell(scenario)
                break
    return scenario
