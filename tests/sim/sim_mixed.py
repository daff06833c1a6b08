"""Runs of several executors, on workers that host some of them, and have few accelerators.

The shapes of work, the faults and the commands are those that were drawn. Of what is drawn here nothing disturbs them.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from rollout.model.item import ItemSpec
from sim_executors import EXECUTORS, Behaviour
from sim_scenario import Fault, RunPlan, Scenario, WorkerPlan

NAMES = tuple(EXECUTORS)
LATE = "late"
WITH_DEVICE = (("slots", 1.0), ("gpus", 1.0))


def mix(scenario: Scenario, random: Random) -> Scenario:
    """Items name executors, parents those of their children; a worker hosts one to three of the four. What none of them
    hosts waits for a worker that joins seconds later and may be struck itself, or there is one executor less. In some it
    is a device that is scarce."""
    if random.random() < 0.3:
        return _scarce(scenario, random)
    first, *others = scenario.workers
    first = replace(first, executors=_some(random, random.randint(2, 3)))  # the one that every label fits
    workers = [first, *(replace(w, executors=_some(random, random.randint(1, 2))) for w in others)]
    hosted = {name for worker in workers for name in worker.executors}
    missing = tuple(name for name in NAMES if name not in hosted)
    faults = list(scenario.faults)
    if missing or random.random() < 0.3:
        joins_at = round(random.uniform(3.0, 16.0), 3)
        executors = missing or _some(random, 1)
        workers.append(
            WorkerPlan(LATE, random.randint(1, 3), random.choice("xy"), executors=executors, joins_at=joins_at)
        )
        if random.random() < 0.5:
            faults.append(_strike(random, scenario, joins_at))
    workers = [replace(worker, devices=_devices(worker, random)) for worker in workers]
    runs = tuple(_named(run, first, random) for run in scenario.runs)
    return replace(
        scenario, workers=tuple(workers), runs=runs, faults=tuple(sorted(faults, key=lambda fault: fault.at))
    )


def _scarce(scenario: Scenario, random: Random) -> Scenario:
    """One worker has a device, which many parents keep while they wait; what they and their children need, places under
    a cap or in its credit, others hold that wait for the device."""
    first, *others = scenario.workers
    first = replace(first, executors=tuple(sorted(NAMES)), devices=1)
    workers = (first, *(replace(worker, executors=("engine", "slot")) for worker in others))
    runs: list[RunPlan] = []
    for run in scenario.runs:
        specs: list[ItemSpec] = []
        for spec in run.specs:
            specs.append(replace(spec, executor="tool", resources=WITH_DEVICE))
            specs += [replace(spec, executor=name) for name in ("model", "slot")]
        items: list[tuple[Behaviour, int]] = []
        for how, index in run.items:
            how = replace(how, ms=min(how.ms, 900))  # one worker does most of it
            if how.children or random.random() < 0.5:
                calls = random.choice(("engine", "slot", "tool"))
                how = replace(how, children=how.children or random.randint(1, 3), calls=calls)
            items.append((how, 3 * index + (0 if how.children else random.randint(1, 2))))
        cap = random.choice((0, 2, 3))
        runs.append(replace(run, items=tuple(items), specs=tuple(specs), max_in_flight=cap, kind=random.choice(NAMES)))
    return replace(scenario, workers=workers, runs=tuple(runs))


def _some(random: Random, count: int) -> tuple[str, ...]:
    return tuple(sorted(random.sample(NAMES, count)))


def _devices(worker: WorkerPlan, random: Random) -> int:
    """An engine of `model` has one, and so has a slot's process for an item that asks for it: both want the last."""
    return random.randint(1, 2) if {"model", "slot", "tool"} & set(worker.executors) else 0


def _strike(random: Random, scenario: Scenario, joins_at: float) -> Fault:
    """Something that happens to the worker that all waited for."""
    at, seconds = round(joins_at + random.uniform(0.2, 2.5), 3), round(random.uniform(0.5, 7.0), 3)
    kind = random.choice(("crash", "pause", "partition", "drain", "child_crash"))
    peer = random.choice(scenario.coordinators)[0] if kind == "partition" else ""
    amount = 1.0 if kind == "drain" else 0.0
    return Fault(kind, at, LATE, peer, seconds, amount)


def _named(run: RunPlan, first: WorkerPlan, random: Random) -> RunPlan:
    """Every spec that the run has for one or two executors, and some of its items as parents. Some ask
    for a device.

    A parent has its device while it waits. So it has none where its children are for `model`, whose engine needs one.
    """
    kind = random.choice(NAMES)
    specs: list[ItemSpec] = []
    for spec in run.specs:
        names = list(first.executors) if spec.require_labels else ["", *NAMES]
        specs += [replace(spec, executor=random.choice(names)) for _ in range(2)]
        slots = [name for name in names if EXECUTORS.get(name) == "slot"]
        specs.append(replace(spec, executor=random.choice(slots), resources=WITH_DEVICE) if slots else specs[-1])
    items: list[tuple[Behaviour, int]] = []
    for how, index in run.items:
        how = _parent(how, random)
        wants_one = how.children and (how.calls or kind) == "model"
        items.append((how, 3 * index + random.randrange(2 if wants_one else 3)))
    return replace(run, items=tuple(items), specs=tuple(specs), kind=kind)


def _parent(how: Behaviour, random: Random) -> Behaviour:
    if how.children or random.random() < 0.15:
        return replace(how, children=how.children or random.randint(1, 3), calls=random.choice(("", *NAMES)))
    return how
