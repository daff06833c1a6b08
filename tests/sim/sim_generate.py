"""A scenario from a seed: shapes of work, and faults by their weights; every third seed is aimed at a safeguard, every
sixth mixes executors, every fifth has workers that cannot start some."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from rollout.model.item import ItemSpec
from rollout.model.run import Lane, Order, Policy
from sim_aimed import AIMED, aim
from sim_executors import Behaviour
from sim_mixed import mix
from sim_scenario import Command, Fault, RunPlan, Scenario, WorkerPlan
from sim_starts import fail_starts, fails_starts

FAULTS_BEGIN, FAULTS_END = 0.3, 14.0
"""Seconds of virtual time."""

WEIGHTS = {
    "partition": 3, "one_way": 3, "cut": 3, "reorder": 2, "duplicate": 2, "pause": 3, "suspend": 1, "crash": 4,
    "child_crash": 2, "failed_commit": 2, "torn_commit": 3, "late_commit": 2, "slow_commit": 2, "store_unreachable": 2,
    "store_full": 1, "clock_jump": 2, "two_leaders": 2, "drain": 2, "drain_in_steal": 2, "slow_node": 2, "handover": 2,
    "client_dies": 2, "operator_drain": 1,
}  # fmt: skip
KINDS = (*WEIGHTS, "renewal", "start_fails")


def _fault(random: Random, kind: str, workers: list[str], coordinators: list[str], clients: list[str]) -> Fault:
    at = round(random.uniform(FAULTS_BEGIN, FAULTS_END - 5.0), 3)
    everybody = workers + coordinators
    if kind in ("partition", "one_way", "cut"):
        a, b = random.choice(workers + clients), random.choice(coordinators)
        if kind == "one_way" and random.random() < 0.5:
            a, b = b, a
        return Fault(kind, at, a, b, round(random.uniform(0.5, 9.0), 3))
    if kind in ("reorder", "slow_node"):
        return Fault(kind, at, random.choice(everybody), seconds=round(random.uniform(1.0, 6.0), 3),
                     amount=round(random.uniform(0.05, 0.6), 3))  # fmt: skip
    if kind in ("pause", "suspend"):
        return Fault(kind, at, random.choice(everybody), seconds=round(random.uniform(0.5, 9.0), 3))
    if kind == "crash":
        return Fault(kind, at, random.choice(everybody), seconds=round(random.uniform(0.2, 6.0), 3))
    if kind in ("failed_commit", "torn_commit", "late_commit"):
        return Fault(kind, at, random.choice(coordinators), amount=random.randint(1, 3))
    if kind == "slow_commit":
        return Fault(kind, at, random.choice(coordinators), seconds=round(random.uniform(0.5, 4.0), 3),
                     amount=round(random.uniform(0.2, 5.0), 3))  # fmt: skip
    if kind == "store_unreachable":
        return Fault(kind, at, random.choice(coordinators), seconds=round(random.uniform(0.5, 8.0), 3))
    if kind == "store_full":
        return Fault(kind, at, seconds=round(random.uniform(0.3, 2.0), 3))
    if kind == "two_leaders":
        return Fault(kind, at, seconds=round(random.uniform(5.5, 8.0), 3), amount=random.randint(0, 1))
    if kind == "clock_jump":
        return Fault(kind, at, random.choice(everybody), amount=random.choice((-3_600_000, -2000, 1500, 20_000)))
    if kind == "duplicate":
        return Fault(kind, at, seconds=round(random.uniform(2.0, 8.0), 3), amount=0.5)
    if kind in ("drain", "drain_in_steal", "operator_drain"):
        return Fault(kind, at, random.choice(workers), seconds=2.0, amount=round(random.uniform(0.0, 3.0), 3))
    if kind == "client_dies":
        return Fault(kind, at, random.choice(clients), seconds=round(random.uniform(0.1, 4.0), 3))
    if kind == "child_crash":
        return Fault(kind, at, random.choice(workers))
    return Fault(kind, at, random.choice(coordinators), seconds=round(random.uniform(0.2, 2.0), 3))


def _behaviour(random: Random, families: bool) -> Behaviour:
    dice = random.random()
    ms = random.choice((20, 60, 150, 400, 900))
    if dice < 0.08:
        return Behaviour(ms, fails=random.randint(1, 3))
    if dice < 0.12:
        return Behaviour(ms, crashes=random.randint(1, 3))
    if families and dice < 0.22:
        return Behaviour(ms, children=random.randint(1, 4), tag=random.randint(0, 5))
    if dice < 0.24:
        return Behaviour(5000)
    return Behaviour(ms)


def _run(random: Random, number: int, client: str, items: int) -> RunPlan:
    """One of several shapes of work."""
    plain = ItemSpec(retry_backoff_ms=200)
    shape = random.choice(
        ("plain", "plain", "chains", "lanes", "families", "groups", "exclusive", "arrival", "pruned", "labels",
         "append", "early", "short")
    )  # fmt: skip
    specs: tuple[ItemSpec, ...] = (plain,)
    options: dict[str, Any] = {}
    if shape == "chains":
        specs = tuple(replace(plain, chain=f"c{n}", pipelined=n == 0) for n in range(3))
    elif shape == "lanes":
        specs = (replace(plain, lane="a"), replace(plain, lane="b", priority=2))
        options["lanes"] = (Lane("a", 2), Lane("b", 3))
    elif shape == "groups":
        specs = (plain, *(replace(plain, group=f"g{n}") for n in range(3)))
    elif shape == "exclusive":
        specs = (replace(plain, exclusive=True), replace(plain, exclusive=True, fail_on_worker_lost=True), plain)
    elif shape == "arrival":
        options["order"] = Order.ARRIVAL.value
    elif shape == "pruned":
        specs = (replace(plain, lane="a", max_attempts=1), replace(plain, lane="b", max_attempts=2))
        options["lanes"] = (Lane("a"), Lane("b"))
        options["policies"] = (Policy("prune_lane", (("after", "2"),)),)
    elif shape == "labels":
        specs = (replace(plain, require_labels=(("kind", "x"),)), replace(plain, affinity="m"), plain)
    elif shape == "append":
        specs = (replace(plain, max_attempts=1),)
        options["policies"] = (Policy("append", (("on", "failed"),)),)
    elif shape == "early":
        specs = (replace(plain, max_attempts=1),)
        options["policies"] = (Policy("stop_early", (("failures", "3"),)),)
    elif shape == "short":
        specs = (replace(plain, timeout_ms=600),)
    chosen = tuple((_behaviour(random, shape == "families"), random.randrange(len(specs))) for _ in range(items))
    return RunPlan(
        client, chosen, specs, at=round(random.uniform(0.0, 3.0) + 3.0 * number, 3), priority=random.randint(0, 2),
        max_in_flight=random.choice((0, 0, 4)), kind=random.choice(("slot", "engine")),
        pause_timeout_ms=random.choice((300, 3000)), **options,
    )  # fmt: skip


VERBS = (
    ("pause", "resume"), ("pause", "resume"), ("pause", "kill"), ("kill", "continue"), ("kill", ""), ("continue", ""),
)  # fmt: skip


def _commands(random: Random, runs: int) -> tuple[Command, ...]:
    commands: list[Command] = []
    for _ in range(random.randint(0, 3)):
        verb, back = random.choice(VERBS)
        commands.append(
            Command(random.randrange(runs), verb, random.randint(0, 12), back, round(random.uniform(0.1, 8.0), 3))
        )
    if random.random() < 0.3:
        commands.append(Command(random.randrange(runs), "priority", random.randint(0, 5)))
    return tuple(commands)


def mixed(seed: int) -> bool:
    return seed % 6 == 1


def generate(seed: int) -> Scenario:
    random = Random(seed)
    workers = tuple(
        WorkerPlan(f"w{n}", random.randint(1, 3), "x" if n == 0 else random.choice(("x", "y")),
                   random.choice((1.0, 1.0, 0.99, 1.01)))
        for n in range(random.choice((3, 3, 3, 4)))
    )  # fmt: skip
    coordinators = tuple((f"c{n}", random.choice((1.0, 1.0, 0.98, 1.02))) for n in range(2))
    clients = ["k0", "k1"][: random.choice((1, 2, 2))]
    total = random.randint(30, 45)
    count = random.randint(2, 3)
    runs = tuple(_run(random, n, random.choice(clients), total // count) for n in range(count))
    names = [w.name for w in workers]
    clients = sorted({run.client for run in runs})
    kinds = random.choices(tuple(WEIGHTS), list(WEIGHTS.values()), k=random.randint(6, 10))
    faults = sorted(
        (_fault(random, kind, names, [c for c, _ in coordinators], clients) for kind in kinds), key=lambda f: f.at
    )
    scenario = Scenario(seed, workers, coordinators, runs, _commands(random, count), tuple(faults))
    if seed % 3 == 2:
        return aim(scenario, AIMED[seed // 3 % len(AIMED)])
    if mixed(seed):
        scenario = mix(scenario, Random(-seed))
    return fail_starts(scenario, Random(-seed - 1)) if fails_starts(seed) else scenario
