"""Training runs and snapshots, as the commands of `train` read them from a cluster."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollout.client.run_session import RunSession
from rollout.client.runs import Runs
from rollout.client.snapshots import Progress, Snapshot, run_with_snapshots, snapshots_of
from rollout.model.errors import ConfigError
from rollout.wire.v1 import runs_pb2 as pb
from rollout.workloads.commit import CommitEntry
from rollout.workloads.invalid_result import lines_of
from rollout.workloads.json_form import JsonObject
from rollout.workloads.train.config import SnapshotsSection
from rollout.workloads.train.lines import COMMITTED, EVALUATIONS, METRICS, NOT_COMMITTED, TrainWriter
from rollout.workloads.train.model_output import write_model
from rollout.workloads.train.retention import outdated
from rollout.workloads.train.segment import Result, Segment, done, seen_of


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A training run in the ledger. `entries` are those of its commit log so far."""

    status: pb.RunStatus
    config: JsonObject
    entries: list[CommitEntry]

    @property
    def run_id(self) -> str:
        return self.status.spec.run_id

    def segments(self) -> list[tuple[CommitEntry, Segment, Result]]:
        """Return the segments that trained, in order."""
        found: list[tuple[CommitEntry, Segment, Result]] = []
        for entry in self.entries:
            if (result := done(entry, "segment")) is not None:
                found.append((entry, Segment.decode(entry.payload), result))
        return found

    def prepared(self) -> Result | None:
        """Return the result of the item that tokenised the rows."""
        return next((result for entry in self.entries if (result := done(entry, "prepare")) is not None), None)


@dataclass(frozen=True, slots=True)
class Figures:
    """The lines of metrics.jsonl and eval.jsonl."""

    metrics: list[JsonObject]
    evaluations: list[JsonObject]

    @property
    def steps(self) -> int:
        return max((line["step"] for line in self.metrics), default=0)

    @property
    def committed_steps(self) -> int:
        return max((line["step"] for line in self.metrics if line.get(COMMITTED, True)), default=0)


async def figures_of(client: Runs, run: TrainingRun) -> Figures:
    """Return the figures known to the cluster now. Figures of a segment that was attempted but has no result are not
    committed."""
    writer = TrainWriter(run.config)
    figures = Figures([], [])
    of_file = {METRICS: figures.metrics, EVALUATIONS: figures.evaluations}
    for entry in run.entries:
        for name, line in lines_of(writer.lines, entry)[1]:
            if name in of_file:
                of_file[name].append(json.loads(line))
    if len(run.entries) < run.status.submitted:
        tries = await RunSession(client, run.run_id).failed_tries(len(run.entries))
        seen = next((found for one in reversed(tries) if (found := seen_of(one.data)).metrics), Result())
        figures.metrics.extend(line | NOT_COMMITTED for line in seen.metrics)
        figures.evaluations.extend(line | NOT_COMMITTED for line in seen.evaluations)
    return figures


async def training_run(client: Runs, run_id: str) -> TrainingRun:
    """Return the training run. Raises NotFoundError, or ConfigError if the run is not a training run."""
    _, status, config, entries = await run_with_snapshots(client, run_id)
    return TrainingRun(status, config, entries)


async def kept_of(client: Runs, run: TrainingRun) -> set[int]:
    """Return the seqs of the segments whose snapshots are kept."""
    names = {entry.seq: result.snapshot for entry, _, result in run.segments()}
    return {one.seq for one in (await client.kept(run.run_id)).entries if names.get(one.seq) == one.object_id.hex()}


async def export_snapshot(
    client: Runs,
    snapshot: Snapshot,
    directory: Path,
    tell: Callable[[str], None],
    progress: Progress | None = None,
    *,
    merged: bool = False,
) -> None:
    """Write a snapshot to the new directory `directory`, as transformers and vLLM load it. With `merged`, an adapter is
    merged into the whole model.

    `progress` counts the bytes of the snapshot, then, with a total of 0, those of the base model if it is needed.

    Raises ConfigError if the directory exists or the base model is not here, NotFoundError, ObjectCorruptError or
    OSError.
    """
    await asyncio.to_thread(_make_room, directory)
    wanted = bytes.fromhex(snapshot.id)

    async def fetch(object_id: bytes, path: Path) -> None:
        size = snapshot.size if object_id == wanted else 0

        def count(done: int) -> None:
            if progress is not None:
                progress(done, size)

        await client.download(snapshot.run_id, object_id, path, count)

    await write_model(fetch, wanted, snapshot.config, directory, tell, merged=merged)


def _make_room(directory: Path) -> None:
    if directory.exists():
        raise ConfigError(f"{directory} is there already: name a new directory")
    directory.parent.mkdir(parents=True, exist_ok=True)


async def prune_snapshots(
    client: Runs, run_id: str, *, keep_last: int | None, keep_labeled: bool | None, max_age_s: int | None
) -> tuple[list[Snapshot], int]:
    """Release outdated snapshots, by these rules or, where one is None, by the run's. Returns (those, number of objects
    freed).

    The newest stays. Bytes that an open run or an item refers to stay as long as it does.
    """
    found = await snapshots_of(client, run_id)
    if not found:
        return [], 0
    section = SnapshotsSection.model_validate(found[-1].config["snapshots"])
    indexes = outdated(
        [(one.made_ms, one.result["label"]) for one in found],
        time.time_ns() // 1_000_000,
        keep_last=section.keep_last if keep_last is None else keep_last,
        keep_labeled=section.keep_labeled if keep_labeled is None else keep_labeled,
        max_age_s=section.max_age_s if max_age_s is None else max_age_s,
    )
    gone = [found[index] for index in indexes]
    if not gone:
        return [], 0
    reply = await client.kept(run_id, release=[one.seq for one in gone])
    return gone, reply.objects_freed
