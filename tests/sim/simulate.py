"""`simulate(seed)`: a cluster on virtual time under the faults of its seed. Raises Violation.

Production functions are looked up when they are called, so that a test can take a safeguard out and expect a Violation.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import structlog
from rollout_coordinator.core.transitions import Table
from rollout_worker import attempts
from sim_checker import Violation
from sim_generate import generate
from sim_scenario import Scenario
from sim_world import STEPS_MIN, World

__all__ = ["Report", "Violation", "run", "simulate"]

LIVENESS_S = 120.0
"""Virtual seconds after the last fault has healed within which every run must have ended."""

Taken = tuple[str, str, str]
"""(table, state, cause)"""


@dataclass(slots=True)
class Report:
    seed: int
    digest: str  # of the trace: equal for equal seeds
    steps: int  # of a core
    idle_steps: int  # of those, with nothing but a tick
    commits: int
    seconds: float  # virtual
    faults: Counter[str] = field(default_factory=Counter[str])
    events: Counter[str] = field(default_factory=Counter[str])
    transitions: Counter[Taken] = field(default_factory=Counter[Taken])
    milestones: list[str] = field(default_factory=list[str])
    trace: list[str] = field(default_factory=list[str])

    @property
    def outline(self) -> list[str]:
        """What struck, who led and how the runs ended; without what depends on the pace of workers."""
        return [line for line in self.milestones if line.startswith(("fault ", "run ")) or line[0] == "c"]


def simulate(seed: int, *, trace: bool = False) -> Report:
    """Violation: an invariant is broken, or a run did not end."""
    return run(generate(seed), trace=trace)


def run(scenario: Scenario, *, trace: bool = False, steps_min: int = STEPS_MIN) -> Report:
    """Any scenario; the trace's end is kept in a Violation. It goes on for at least `steps_min` steps of a core."""
    taken: Counter[Taken] = Counter()
    table_move, held_move = Table.move, attempts.Held.move

    def move(self: Any, state: Any, cause: str) -> Any:
        after = table_move(self, state, cause)
        taken[self.name, state.value, cause] += 1
        return after

    def held(self: Any, cause: str) -> None:
        taken["attempt", self.state.value, cause] += 1
        held_move(self, cause)

    known = vars(asyncio.tasks)
    registry: Any = known["_scheduled_tasks" if "_scheduled_tasks" in known else "_all_tasks"]  # until Python 3.11
    collecting = gc.isenabled()
    loggers: Any = type(structlog.get_logger())
    logger = loggers.__getattr__
    gc.disable()
    loggers.__getattr__ = lambda self, name: _ignore  # logging costs more than what is logged
    Table.move, attempts.Held.move = move, held  # type: ignore[method-assign]
    registry.add = _ignore  # the interpreter's list of all tasks is of no use here and costs a tenth of a seed
    world = World(scenario, trace=trace, steps_min=steps_min)
    try:
        try:
            world.scheduler.run(scenario.heal_at + LIVENESS_S)
            ended = world.scheduler.stop
            if world.failure is None:
                world.lost_exceptions()  # first: a task that died of one is what a run that does not end waits for
            if world.failure is None and not ended:
                world.violation("liveness", hang(world))
            if world.failure is None:
                world.checker.finished()
        except Violation as violation:
            world.violation(violation.invariant, violation.message)
        if world.failure is not None:
            raise _told(world)
        return Report(
            scenario.seed, world.digest(), world.steps, world.idle_steps, world.commits, world.scheduler.now,
            world.faults, world.events, taken, world.milestones, world.trace,
        )  # fmt: skip
    finally:
        world.over = True
        world.scheduler.close()
        del registry.add
        Table.move, attempts.Held.move = table_move, held_move  # type: ignore[method-assign]
        loggers.__getattr__ = logger
        if collecting:
            gc.enable()


def _ignore(*_: Any, **__: Any) -> None:
    pass


def _told(world: World) -> Violation:
    violation = world.failure
    assert violation is not None
    violation.seed = world.scenario.seed
    violation.at = world.scheduler.now
    violation.tail = (world.trace or world.milestones)[-60:]
    return violation


def hang(world: World) -> str:
    tables = world.store.tables
    runs = []
    for run_id in world.plans:
        row = tables.runs.get(run_id)
        log = tables.logs.get(row.root_log) if row is not None else None
        runs.append(
            f"{run_id[-3:]} {row.state if row else None} {log.cursor if log else 0}/{log.submitted if log else 0}"
        )
    holding = {w.name: len(w.driver.session.held) for w in world.workers.values() if w.alive and w.driver}
    return f"not every run ended: {runs}; held {holding}; lease {tables.lease}"
