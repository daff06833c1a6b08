"""Snapshots of training runs, as their clusters keep them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rollout.client.runs import Runs
from rollout.model.errors import ConfigError, InvalidResultError, NotFoundError
from rollout.model.ids import short
from rollout.model.item import Outcome
from rollout.snapshots.parts import Kind
from rollout.wire.v1 import runs_pb2 as pb
from rollout.workloads.commit import CommitEntry
from rollout.workloads.json_form import JsonObject, lookup
from rollout.workloads.port import FoundSnapshot
from rollout.workloads.train.config import SnapshotsSection
from rollout.workloads.train.model_output import write_model
from rollout.workloads.train.retention import outdated
from rollout.workloads.train.segment import Result, Segment

WORKLOAD = "train"
SHORT = 12
_RUNS_MAX = 1000
Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)"""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`id`: blake3 of its archive, hex. `seq`: of the segment that made it. `config`: of its run."""

    id: str
    run_id: str
    run_name: str
    seq: int
    made_ms: int
    result: Result
    config: JsonObject
    kind: Kind = "train_state"

    @property
    def short(self) -> str:
        return self.id[:SHORT]

    @property
    def step(self) -> int:
        return self.result.step

    def as_found(self) -> FoundSnapshot:
        return FoundSnapshot(self.id, self.run_id, self.config, asdict(self.result))


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """What the ledger has of a training run. `entries`: of its commit log so far."""

    status: pb.RunStatus
    config: JsonObject
    entries: list[CommitEntry]

    @property
    def run_id(self) -> str:
        return self.status.spec.run_id

    def segments(self) -> list[tuple[CommitEntry, Segment, Result]]:
        """Those that trained, in order."""
        found: list[tuple[CommitEntry, Segment, Result]] = []
        for entry in self.entries:
            if entry.outcome is Outcome.DONE:
                segment = Segment.decode(entry.payload)
                if segment.op == "segment":
                    with suppress(InvalidResultError):  # it counts as failed
                        found.append((entry, segment, Result.decode(entry.data)))
        return found

    def prepared(self) -> Result | None:
        """The result of the item that made tokens of the rows."""
        for entry in self.entries:
            if entry.outcome is Outcome.DONE and Segment.decode(entry.payload).op == "prepare":
                with suppress(InvalidResultError):
                    return Result.decode(entry.data)
        return None


async def training_run(client: Runs, run_id: str) -> TrainingRun:
    """NotFoundError; ConfigError: it trained nothing."""
    status = await client.get(run_id)
    config: JsonObject = json.loads(status.spec.config) if status.spec.workload == WORKLOAD else {}
    if not config or config.get("verifies"):
        raise ConfigError(f"run {short(run_id)} ({status.spec.name}) is no training run and has no snapshots")
    entries: list[CommitEntry] = []
    if status.cursor:
        async with aclosing(client.watch(run_id, payloads=True)) as pages:
            async for page in pages:
                entries += page.entries
                if len(entries) >= status.cursor:
                    break
    return TrainingRun(status, config, entries)


async def kept_of(client: Runs, run: TrainingRun) -> set[int]:
    """Seqs of the segments whose snapshots are kept."""
    names = {entry.seq: result.snapshot for entry, _, result in run.segments()}
    return {one.seq for one in (await client.kept(run.run_id)).entries if names.get(one.seq) == one.object_id.hex()}


async def snapshots_of(client: Runs, run_id: str) -> list[Snapshot]:
    """Those of a run that are kept, oldest first. NotFoundError; ConfigError: it trained nothing."""
    run = await training_run(client, run_id)
    kept = await kept_of(client, run)
    return [
        Snapshot(
            result.snapshot, run_id, run.status.spec.name, entry.seq, entry.accepted_ms, result, run.config
        )
        for entry, _, result in run.segments()
        if entry.seq in kept
    ]  # fmt: skip


async def all_snapshots(client: Runs) -> list[Snapshot]:
    """Of every run, newest run first."""
    runs = [run.spec for run in await client.list(limit=_RUNS_MAX) if run.spec.workload == WORKLOAD]
    trained = [spec.run_id for spec in runs if not json.loads(spec.config).get("verifies")]
    return [one for run_id in trained for one in await snapshots_of(client, run_id)]


async def find_snapshot(client: Runs, text: str) -> Snapshot:
    """By the beginning of its id. NotFoundError; ConfigError where it may be any of several."""
    wanted = text.removeprefix("snapshot:").lower()
    found = {one.id: one for one in await all_snapshots(client) if wanted and one.id.startswith(wanted)}
    if not found:
        raise NotFoundError(f"there is no snapshot {text!r}, or it was pruned; `rollout snapshot list` lists them")
    if len(found) > 1:
        listed = "\n".join(f"  {one.short}  run {short(one.run_id)}, step {one.step}" for one in found.values())
        raise ConfigError(f"{text!r} may be any of {len(found)} snapshots: give more of the id\n{listed}")
    return next(iter(found.values()))


async def snapshot_at(client: Runs, run_id: str, step: int | None) -> Snapshot:
    """Of a run, the one after `step`, or its last. NotFoundError that says which there are, and why this one is not."""
    found = await snapshots_of(client, run_id)
    by_step = {one.step: one for one in found}
    if step is None and found:
        return found[-1]
    if step is not None and step in by_step:
        return by_step[step]
    run = await training_run(client, run_id)
    committed = [result.step for _, _, result in run.segments()]
    who = f"run {short(run_id)} ({run.status.spec.name})"
    kept = f"it has those of the steps {_steps(by_step)}" if by_step else "it has none"
    if step is None:
        raise NotFoundError(f"{who} has no snapshot{' yet' if not committed else ': they were pruned'}")
    if step in committed:
        raise NotFoundError(
            f"the snapshot of step {step} of {who} was let go, by [snapshots] keep_last or by hand; {kept}. Take one "
            "of them, or train with keep_last = 0 to keep all"
        )
    nearest = sorted(sorted(committed, key=lambda one: abs(one - step))[:2])
    near = f"the nearest are {_steps(nearest)}" if nearest else "it has done no segment yet"
    raise NotFoundError(f"no segment of {who} ended at step {step}: {near}; {kept}")


def _steps(steps: Sequence[int] | dict[int, Snapshot]) -> str:
    listed = sorted(steps)
    shown = listed if len(listed) <= 12 else listed[-12:]
    return ("... " if len(listed) > 12 else "") + ", ".join(map(str, shown))


async def export_snapshot(
    client: Runs, snapshot: Snapshot, directory: Path, progress: Progress | None = None, *, merged: bool = False
) -> None:
    """Into the new directory `directory`, as transformers and vLLM load it. `merged`: of an adapter, the whole model.

    `progress`: of the snapshot, then, with 0 as bytes in all, of that of the base model, where it needs one.

    ConfigError: there is a directory already, or the base model is not here. NotFoundError, ObjectCorruptError,
    OSError.
    """
    await asyncio.to_thread(_make_room, directory)
    wanted = bytes.fromhex(snapshot.id)

    async def fetch(object_id: bytes, path: Path) -> None:
        size = snapshot.result.size if object_id == wanted else 0

        def tell(done: int) -> None:
            if progress is not None:
                progress(done, size)

        await client.download(snapshot.run_id, object_id, path, tell)

    await write_model(fetch, wanted, snapshot.config, directory, merged=merged)


def _make_room(directory: Path) -> None:
    if directory.exists():
        raise ConfigError(f"{directory} is there already: name a new directory")
    directory.parent.mkdir(parents=True, exist_ok=True)


async def prune_snapshots(
    client: Runs, run_id: str, *, keep_last: int | None, keep_labeled: bool | None, max_age_s: int | None
) -> tuple[list[Snapshot], int]:
    """Let go of what is outdated, by these rules or where one is None by the run's: (those, objects that were freed).

    The newest stays. The bytes of one that an open run or an item names stay until that is over.
    """
    found = await snapshots_of(client, run_id)
    if not found:
        return [], 0
    section = SnapshotsSection.model_validate(found[-1].config["snapshots"])
    indexes = outdated(
        [(one.made_ms, one.result.label) for one in found],
        time.time_ns() // 1_000_000,
        keep_last=section.keep_last if keep_last is None else keep_last,
        keep_labeled=section.keep_labeled if keep_labeled is None else keep_labeled,
        max_age_s=section.max_age_s if max_age_s is None else max_age_s,
    )
    gone = [found[index] for index in indexes]
    if not gone:
        return [], 0
    reply = await client.kept(run_id, let_go=[one.seq for one in gone])
    return gone, reply.objects_freed


def keep_names(stored: JsonObject, config: JsonObject, keys: Sequence[str]) -> list[str]:
    """A run that goes on keeps the snapshots that it began with, whatever `run:ID` would stand for now. The keys of
    those that it began without."""
    left: list[str] = []
    for key in keys:
        old, new = lookup(stored, key), lookup(config, key)
        if old and old.get("uri") == new["uri"] and old.get("step") == new.get("step"):
            new.update({name: old[name] for name in ("snapshot", "content_id", "before") if name in old})
        else:
            left.append(key)
    return left


async def bring_snapshot(
    source: Runs, snapshot: Snapshot, target: Runs, run_id: str, scratch: Path, tell: Progress
) -> None:
    """From one cluster to another, for the open run `run_id` of that. `scratch`: a file for the bytes meanwhile, from
    which a call that was cut off goes on."""
    size = snapshot.result.size
    object_id = bytes.fromhex(snapshot.id)
    try:
        await source.download(snapshot.run_id, object_id, scratch, lambda done: tell(done, 2 * size))
        async with target.objects(run_id) as objects:
            await objects.put_path(scratch, known_id=object_id, progress=lambda done: tell(size + done, 2 * size))
    finally:
        await asyncio.to_thread(scratch.unlink, missing_ok=True)


async def pin_snapshot(client: Runs, run_id: str, snapshot_id: str) -> bool:
    """It stays as long as the run, which must be open. False: the cluster has none such."""
    async with client.objects(run_id) as objects:
        (there,) = await objects.has([bytes.fromhex(snapshot_id)])
    return there
