"""Scenarios aimed at one safeguard each: the situation that it is for seldom comes about by chance.

A story takes a generated scenario and returns it with work and faults of its own in front. The faults that were drawn
strike after it, so that they do not end the situation before it began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random

from rollout.model.item import ItemSpec
from sim_executors import Behaviour
from sim_scenario import Command, Fault, RunPlan, Scenario

LAST_DRAWN = 9.0
"""Virtual time until which the drawn faults strike."""
Story = Callable[[Scenario, Random], Scenario]


def aim(scenario: Scenario, story: Story) -> Scenario:
    return story(scenario, Random(-scenario.seed))


def _drawn_after(scenario: Scenario, end: float, keep: int) -> tuple[Fault, ...]:
    """The first `keep` of the drawn faults, moved to between `end` and a little later."""
    squeeze = max(1.5, LAST_DRAWN - end) / LAST_DRAWN
    return tuple(replace(f, at=round(end + f.at * squeeze, 3)) for f in scenario.faults[:keep])


def _with(
    scenario: Scenario, run: RunPlan | None, faults: Iterable[Fault], end: float, slots: int = 1, keep: int = 4
) -> Scenario:
    """`run` in place of the first one, `faults` in front, no operator, at least `slots` at every worker."""
    return replace(
        scenario,
        workers=tuple(replace(w, slots=max(slots, w.slots)) for w in scenario.workers),
        runs=scenario.runs if run is None else (run, *scenario.runs[1:]),
        commands=(),
        faults=tuple(sorted((*faults, *_drawn_after(scenario, end, keep)), key=lambda f: f.at)),
    )


def _run(scenario: Scenario, count: int, ms: Callable[[], int], spec: ItemSpec, at: float) -> RunPlan:
    items = tuple((Behaviour(ms()), 0) for _ in range(count))
    return RunPlan(scenario.runs[0].client, items, (spec,), at=at, priority=2)


def silent_holder(scenario: Scenario, random: Random) -> Scenario:
    """A worker that runs long exclusive items is heard no more; others begin them before it has finished.

    It must have fenced itself and killed them by then. An item outlasts the failure timeout, and the partition an item.
    """
    spec = ItemSpec(exclusive=True, retry_backoff_ms=200)
    run = _run(scenario, 2 * len(scenario.workers), lambda: random.choice((12_000, 14_000)), spec, 0.0)
    worker = random.choice(scenario.workers).name
    at = round(random.uniform(1.2, 2.0), 3)
    faults = [Fault("partition", at, worker, name, 12.0) for name, _ in scenario.coordinators]
    return _with(scenario, run, faults, at + 10.0, slots=4, keep=3)


def crossed_steal(scenario: Scenario, random: Random) -> Scenario:
    """Exclusive items are stolen from a worker that hears of it late, and begins them in the meantime."""
    spec = ItemSpec(exclusive=True, retry_backoff_ms=200)
    run = _run(scenario, 16, lambda: random.choice((150, 400, 900)), spec, 0.0)
    worker = random.choice(scenario.workers).name
    faults = [Fault("slow_node", 0.3, worker, seconds=5.0, amount=round(random.uniform(0.2, 0.5), 3))]
    faults += [Fault("one_way", 1.0 + n, scenario.coordinators[0][0], worker, 0.8) for n in (0, 2)]
    return _with(scenario, run, faults, 6.0)


def late_words(scenario: Scenario, random: Random) -> Scenario:
    """A leader hands over while its last words are under way; they arrive after the first ones of its successor.

    Workers that open their streams anew find the successor at once. Their old channel lives a moment longer, and on it
    arrives what the network held back.
    """
    faults: list[Fault] = []
    for n in range(3):
        name, at = scenario.coordinators[n % 2][0], 1.5 + 2.5 * n
        faults.append(Fault("handover", at, name))
        for worker in scenario.workers:
            faults.append(Fault("one_way", round(at - 1.1, 3), name, worker.name, 1.1 + random.choice((0.4, 0.5, 0.7))))
            faults.append(Fault("renewal", round(at + 0.05, 3), worker.name))
    return _with(scenario, None, faults, 8.0, keep=3)


def reopened_stream(scenario: Scenario, random: Random) -> Scenario:
    """Workers open their streams anew, as with every new certificate, while what they said on the old one is under way
    and the leader is busy with a commit."""
    spec = ItemSpec(retry_backoff_ms=200)
    run = _run(scenario, 30, lambda: random.choice((20, 60, 150)), spec, 0.0)
    faults = [Fault("slow_commit", 0.15, name, seconds=3.0, amount=0.1) for name, _ in scenario.coordinators]
    for worker in scenario.workers:
        faults.append(Fault("reorder", 0.2, worker.name, seconds=3.0, amount=0.15))
        faults += [Fault("renewal", round(0.4 + 0.6 * n + random.uniform(0.0, 0.3), 3), worker.name) for n in range(4)]
    return _with(scenario, run, faults, 3.5)


def killed_and_continued(scenario: Scenario, random: Random) -> Scenario:
    """A run of exclusive items is killed and goes on at once, while its workers, which hear late, still stop them; or
    the leader is gone that gave the order."""
    spec = ItemSpec(exclusive=True, retry_backoff_ms=200)
    run = _run(scenario, 12, lambda: random.choice((400, 900, 2_000)), spec, 0.0)
    leader, worker = scenario.coordinators[0][0], random.choice(scenario.workers).name
    faults = [Fault("slow_node", 0.3, worker, seconds=5.0, amount=round(random.uniform(0.1, 0.5), 3))]
    if random.random() < 0.5:
        faults.append(Fault("one_way", 1.0, leader, worker, 1.5))
    if random.random() < 0.5:
        faults.append(Fault("crash", round(random.uniform(1.0, 3.0), 3), leader, seconds=1.0))
    commands = tuple(
        Command(0, "kill", after, "continue", random.choice((0.0, 0.05, 0.3, 2.0)))
        for after in (1, random.choice((3, 6)))
    )
    return replace(_with(scenario, run, faults, 6.0), commands=commands)


def leaders_die_in_recovery(scenario: Scenario, random: Random) -> Scenario:
    """The leader dies, and then each that takes over, before or after its workers found it. Not one of the seeds'
    stories: `test_recovery.py` tells it."""
    names = [name for name, _ in scenario.coordinators]
    at = round(random.uniform(0.6, 2.5), 3)
    faults = [Fault("crash", at, names[0], seconds=random.choice((0.3, 3.0)))]
    for n in range(random.randint(1, 4)):
        after = random.choice((0.0, 0.01, 0.03, 0.1, 0.3, 1.0, random.uniform(0.0, 5.0)))
        down = round(random.uniform(0.2, 4.0), 3)
        faults.append(Fault("crash_in_recovery", at, names[(n + 1) % 2], seconds=down, amount=round(after, 3)))
    runs = tuple(replace(run, at=round(0.2 * n, 3)) for n, run in enumerate(scenario.runs))
    return replace(_with(scenario, None, faults, at + 5.0), runs=runs, commands=scenario.commands)


def quarantined_holder(scenario: Scenario, random: Random) -> Scenario:
    """A worker that runs long exclusive items breaks the protocol, and does not hear what the leader makes of that: it
    runs on until it fences itself. Not one of the seeds' stories: `test_exclusive.py` tells it."""
    spec = ItemSpec(exclusive=True, retry_backoff_ms=200)
    run = _run(scenario, 2 * len(scenario.workers), lambda: random.choice((8_000, 14_000)), spec, 0.0)
    worker = random.choice(scenario.workers).name
    at = round(random.uniform(1.2, 2.0), 3)
    faults = [Fault("lie", at, worker)]
    faults += [Fault("one_way", round(at - 0.3, 3), name, worker, 9.0) for name, _ in scenario.coordinators]
    if random.random() < 0.5:
        after = round(at + random.uniform(0.1, 4.0), 3)
        faults.append(Fault("crash", after, scenario.coordinators[0][0], seconds=1.0))
    return _with(scenario, run, faults, at + 10.0, slots=4, keep=3)


def healed_fence(scenario: Scenario, random: Random) -> Scenario:
    """A worker that runs exclusive items hears nobody until it fences itself, and is back before it is given up: what
    it killed may not have ended when it says Hello. Not one of the seeds' stories: `test_exclusive.py` tells it."""
    spec = ItemSpec(exclusive=True, retry_backoff_ms=200, fail_on_worker_lost=random.random() < 0.2)
    run = _run(scenario, 2 * len(scenario.workers), lambda: random.choice((8_000, 12_000)), spec, 0.0)
    faults: list[Fault] = []
    for worker in random.sample(scenario.workers, 2):
        at = round(random.uniform(0.8, 1.6), 3)
        seconds = round(random.uniform(3.9, 5.2), 3)
        kind = random.choice(("one_way", "partition"))
        faults += [Fault(kind, at, name, worker.name, seconds) for name, _ in scenario.coordinators]
    return _with(scenario, run, faults, 8.0, slots=4, keep=3)


def clocks_jump(scenario: Scenario, random: Random) -> Scenario:
    """Every clock goes a day ahead and comes back, while items fail that are to be tried again; then the leader may die.
    Not one of the seeds' stories: `test_clocks.py` tells it."""
    failing = tuple((Behaviour(random.choice((100, 300)), fails=random.randint(0, 2)), 0) for _ in range(20))
    run = replace(_run(scenario, 0, lambda: 0, ItemSpec(retry_backoff_ms=500, max_attempts=5), 0.0), items=failing)
    at = round(random.uniform(0.4, 1.0), 3)
    names = [name for name, _ in scenario.coordinators] + [w.name for w in scenario.workers]
    faults = [Fault("clock_jump", at, name, amount=86_400_000) for name in names]
    if random.random() < 0.7:
        after = round(at + random.uniform(1.0, 5.0), 3)
        faults.append(Fault("crash", after, scenario.coordinators[0][0], seconds=random.choice((0.5, 4.0))))
    return _with(scenario, run, faults, at + 5.0, keep=3)


AIMED: tuple[Story, ...] = (silent_holder, crossed_steal, late_words, reopened_stream, killed_and_continued)
