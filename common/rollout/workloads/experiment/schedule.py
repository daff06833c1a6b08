"""The order in which trials start and are committed."""

from __future__ import annotations

import random
from collections.abc import Iterator

from rollout.model.errors import ConfigError
from rollout.workloads.experiment.contracts import ScheduleOrder, Slot


def schedule(order: ScheduleOrder, variants: int, tasks: int, replications: int, seed: int) -> Iterator[Slot]:
    """Yield every slot once, in `order`: variant_sequential by (variant, task, replication), paired_interleaved by
    (task, variant, replication); randomized is a permutation of the latter by `seed`."""
    if order == "variant_sequential":
        triples = ((v, t, r) for v in range(variants) for t in range(tasks) for r in range(replications))
    else:
        triples = ((v, t, r) for t in range(tasks) for v in range(variants) for r in range(replications))
    if order == "randomized":
        triples = iter(_shuffled(list(triples), seed))
    return (Slot.model_construct(variant_idx=v, task_idx=t, repl_idx=r) for v, t, r in triples)


def _shuffled(slots: list[tuple[int, int, int]], seed: int) -> list[tuple[int, int, int]]:
    """Shuffle (Fisher-Yates) with `random()`, the only method of Python's generator that is the same in all
    versions."""
    draw = random.Random(seed).random
    for last in range(len(slots) - 1, 0, -1):
        other = int(draw() * (last + 1))
        slots[last], slots[other] = slots[other], slots[last]
    return slots


def trial_id(schedule_index: int) -> str:
    return f"trial_{schedule_index + 1:06d}"


def slot_of(text: str) -> int:
    """Parse the id of a trial, or a plain index. Raises ConfigError."""
    number = text.removeprefix("trial_")
    if not (number.isascii() and number.isdigit()):
        raise ConfigError(f'"{text[:60]}" is no trial, such as trial_000001, and no index of a slot')
    return int(number) - (number != text)
