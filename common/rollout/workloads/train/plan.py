"""Turns a configuration into the chain of a training run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from blake3 import blake3

from rollout.model.item import ItemSpec, NewItem
from rollout.workloads.json_form import JsonObject, canonical
from rollout.workloads.train.config import TrainConfig
from rollout.workloads.train.policy_check import identity_of
from rollout.workloads.train.segment import CHAIN, Segment
from rollout.workloads.train.steps import steps_of

SCHEMA = 1
_ATTEMPTS = 5


def steps_at_most(config: TrainConfig, rows: int) -> int:
    """Return the maximum number of optimiser steps; with epochs, the number if no row is dropped or packed."""
    settings = config.algorithm.settings
    if settings.budget.max_steps is not None:
        return settings.budget.max_steps
    return steps_of(rows, settings.budget.epochs or 1, settings.step_rows)


def segments(steps: int, every: int, before: JsonObject | None = None) -> Iterator[Segment]:
    """Yield the segments. `before` has fields of the result of another run that this one continues, including
    `step`."""
    begun = before or {}
    yield Segment("prepare")
    for first in range(int(begun.get("step", 0)), steps, every):
        yield Segment("segment", first, min(every, steps - first), begun)
        begun = {}


def items(config: JsonObject, start: int) -> Iterator[NewItem]:
    """Yield items from seq `start` on. An item's identity covers what it depends on: settings, model, data and
    position."""
    run = config["run"]
    spec = ItemSpec(chain=CHAIN, pipelined=True, max_attempts=_ATTEMPTS, max_worker_lost=run["max_worker_lost"])
    model, digest = config["model"]["content_id"], config["input"]["digest"]
    parts = [SCHEMA, config["algorithm"], model, digest, config["evaluation"], *identity_of(config)]
    identity = canonical(parts)
    for seq, segment in enumerate(segments_of(config)):
        if seq >= start:
            payload = segment.encode()
            # The report of the data is told before the first step: that one waits until it is committed.
            spec = replace(spec, pipelined=seq != 1 and "generation" not in config)
            yield NewItem(blake3(identity + seq.to_bytes(8, "big") + payload).digest(), payload, spec)


def segments_of(config: JsonObject) -> Iterator[Segment]:
    """Yield the segments of a run with this configuration."""
    start: JsonObject | None = config["start"]
    begun: JsonObject = start["before"] if start else {}
    return segments(config["steps"], config["snapshots"]["every_steps"], begun)
