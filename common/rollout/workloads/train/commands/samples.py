"""Samples of a run's committed segments, from its ledger."""

from __future__ import annotations

import heapq
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rollout.client.runs import Runs
from rollout.model.errors import ConfigError, NotFoundError
from rollout.model.ids import short
from rollout.workloads.json_form import JsonObject
from rollout.workloads.train.commands.snapshots import training_run
from rollout.workloads.train.samples import ONLINE, read_samples


async def samples_of(
    client: Runs, run_id: str, *, step: int | None, best: int | None, worst: int | None
) -> list[JsonObject]:
    """Return the samples of one step, or the `best` or `worst` of all steps by reward; by default those of the last
    committed step.

    Raises ConfigError if the run draws no samples, NotFoundError if the step is not committed.
    """
    run = await training_run(client, run_id)
    who = f"run {short(run_id)}"
    if (kind := run.config["algorithm"]["kind"]) not in ONLINE:
        raise ConfigError(f"{who} is {kind}, which draws no samples: those are of {' and '.join(sorted(ONLINE))}")
    segments = [(segment.first, result) for _, segment, result in run.segments() if result.samples]
    if not segments:
        raise NotFoundError(f"{who} has no samples: none of its segments is committed")
    last = segments[-1][1].step
    if step is None and best is None and worst is None:
        step = last
    if step is not None:
        segments = [(first, result) for first, result in segments if first < step <= result.step]
        if not segments:
            raise NotFoundError(f"{who} has no samples of step {step}: it has those of steps 1 to {last}")
    found: list[JsonObject] = []
    with tempfile.TemporaryDirectory(prefix="rollout-samples-") as scratch:
        for first, result in segments:
            path = Path(scratch) / str(first)
            await client.download(run_id, bytes.fromhex(result.samples), path)
            found = chosen([*found, *of_step(read_samples(path), step)], best, worst)
            path.unlink()
    return found


def of_step(samples: Iterator[JsonObject], step: int | None) -> Iterator[JsonObject]:
    return (one for one in samples if step is None or one["step"] == step)


def chosen(samples: list[JsonObject], best: int | None, worst: int | None) -> list[JsonObject]:
    """Return the best or the worst samples, best or worst first, equal ones in order of steps; otherwise all."""
    if best is None and worst is None:
        return samples
    judged = [one for one in samples if one["reward"] is not None]
    if best is not None:
        return heapq.nsmallest(best, judged, key=lambda one: -one["reward"])
    return heapq.nsmallest(worst or 0, judged, key=lambda one: one["reward"])
