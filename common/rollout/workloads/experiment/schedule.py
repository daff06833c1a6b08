"""The order in which trials are begun and committed."""

from __future__ import annotations

import random
from collections.abc import Iterator

from rollout.workloads.experiment.contracts import ScheduleOrder, Slot


def schedule(order: ScheduleOrder, variants: int, tasks: int, replications: int, seed: int) -> Iterator[Slot]:
    """Every slot once, in `order`: variant_sequential by (variant, task, replication), paired_interleaved by (task,
    variant, replication); randomized is a permutation of the latter (Fisher-Yates, Mersenne Twister) by `seed`."""
    if order == "variant_sequential":
        triples = ((v, t, r) for v in range(variants) for t in range(tasks) for r in range(replications))
    else:
        triples = ((v, t, r) for t in range(tasks) for v in range(variants) for r in range(replications))
    if order == "randomized":
        shuffled = list(triples)
        random.Random(seed).shuffle(shuffled)
        triples = iter(shuffled)
    return (Slot(variant_idx=v, task_idx=t, repl_idx=r) for v, t, r in triples)


def trial_id(schedule_index: int) -> str:
    return f"trial_{schedule_index + 1:06d}"
