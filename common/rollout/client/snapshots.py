"""Snapshots that runs make, as their clusters keep them: finds them, copies them to another cluster, pins them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from rollout.client.run_session import RunSession
from rollout.client.runs import Runs
from rollout.model.errors import ConfigError, NotFoundError
from rollout.model.ids import short
from rollout.model.run import ENDED
from rollout.snapshots.parts import Kind
from rollout.wire.v1 import runs_pb2 as pb
from rollout.workloads.commit import CommitEntry
from rollout.workloads.json_form import JsonObject, lookup
from rollout.workloads.port import ABOUT, FoundSnapshot, SnapshotMaker
from rollout.workloads.registered import find

SHORT = 12
_RUNS_MAX = 1000
SnapshotOf = Callable[[CommitEntry], JsonObject | None]
_ENDED = frozenset(str(state) for state in ENDED)
Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class NoSnapshotYetError(NotFoundError):
    """Of a run that goes on."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot. `id` is blake3 of its archive, hex. `seq` and `result` are those of the item that made it, `config`
    that of its run."""

    id: str
    run_id: str
    run_name: str
    seq: int
    made_ms: int
    result: JsonObject
    config: JsonObject
    kind: Kind = "train_state"

    @property
    def short(self) -> str:
        return self.id[:SHORT]

    @property
    def step(self) -> int:
        return self.result["step"]

    @property
    def size(self) -> int:
        return self.result["size"]

    def as_found(self) -> FoundSnapshot:
        return FoundSnapshot(self.id, self.run_id, self.config, self.result)


def _snapshots(workload: str, config: JsonObject) -> SnapshotOf | None:
    found = find(workload)
    return found.snapshot_of if isinstance(found, SnapshotMaker) and not config.get(ABOUT) else None


async def run_with_snapshots(
    client: Runs, run_id: str
) -> tuple[SnapshotOf, pb.RunStatus, JsonObject, list[CommitEntry]]:
    """Return (a function from an entry to its snapshot, the run's status, its configuration, its commit log so far).
    Raises NotFoundError, or ConfigError if it makes no snapshots."""
    status = await client.get(run_id)
    config = json.loads(status.spec.config or "{}")
    snapshot_of = _snapshots(status.spec.workload, config)
    if snapshot_of is None:
        raise ConfigError(f"run {short(run_id)} ({status.spec.name}) is no training run and has no snapshots")
    async with aclosing(RunSession(client, run_id).log(0, status.cursor)) as pages:
        entries = [entry async for page in pages for entry in page]
    return snapshot_of, status, config, entries


async def _made(client: Runs, run_id: str) -> tuple[pb.RunStatus, list[Snapshot]]:
    """Return the snapshots that a run has made so far, the oldest first, whether or not they are kept."""
    snapshot_of, status, config, entries = await run_with_snapshots(client, run_id)
    made = ((entry, snapshot_of(entry)) for entry in entries)
    return status, [
        Snapshot(result["snapshot"], run_id, status.spec.name, entry.seq, entry.accepted_ms, result, config)
        for entry, result in made
        if result is not None
    ]


async def _kept(client: Runs, run_id: str, made: Sequence[Snapshot]) -> list[Snapshot]:
    kept = {(one.seq, one.object_id.hex()) for one in (await client.kept(run_id)).entries}
    return [one for one in made if (one.seq, one.id) in kept]


async def snapshots_of(client: Runs, run_id: str) -> list[Snapshot]:
    """Return a run's kept snapshots, the oldest first. Raises NotFoundError, or ConfigError if it makes none."""
    _, made = await _made(client, run_id)
    return await _kept(client, run_id, made)


async def all_snapshots(client: Runs) -> list[Snapshot]:
    """Return the snapshots of all runs, the newest run first."""
    runs = [run.spec for run in await client.list(limit=_RUNS_MAX)]
    makers = [spec.run_id for spec in runs if _snapshots(spec.workload, json.loads(spec.config)) is not None]
    return [one for run_id in makers for one in await snapshots_of(client, run_id)]


async def find_snapshot(client: Runs, text: str) -> Snapshot:
    """Find a snapshot by a prefix of its id. Raises NotFoundError, or ConfigError if several match."""
    wanted = text.removeprefix("snapshot:").lower()
    found = {one.id: one for one in await all_snapshots(client) if wanted and one.id.startswith(wanted)}
    if not found:
        raise NotFoundError(f"there is no snapshot {text!r}, or it was pruned; `rollout snapshot list` lists them")
    if len(found) > 1:
        listed = "\n".join(f"  {one.short}  run {short(one.run_id)}, step {one.step}" for one in found.values())
        raise ConfigError(f"{text!r} may be any of {len(found)} snapshots: give more of the id\n{listed}")
    return next(iter(found.values()))


async def snapshot_at(client: Runs, run_id: str, step: int | None) -> Snapshot:
    """Return a run's snapshot after `step`, or its last. Raises NotFoundError with those that exist, and why this one
    does not."""
    status, made = await _made(client, run_id)
    found = await _kept(client, run_id, made)
    by_step = {one.step: one for one in found}
    if step is None and found:
        return found[-1]
    if step is not None and step in by_step:
        return by_step[step]
    committed = [one.step for one in made]
    who = f"run {short(run_id)} ({status.spec.name})"
    kept = f"it has those of the steps {_steps(by_step)}" if by_step else "it has none"
    if step is None and not committed and status.state not in _ENDED:
        raise NoSnapshotYetError(f"{who} has no snapshot yet")
    if step is None:
        raise NotFoundError(f"{who} has no snapshot{': they were pruned' if committed else ''}")
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


def keep_names(stored: JsonObject, config: JsonObject, keys: Sequence[str]) -> list[str]:
    """Keep the snapshots that a resumed run started with, whatever `run:ID` would mean now, and return the keys without
    one."""
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
    """Copy a snapshot to another cluster, for its open run `run_id`. `scratch` is a temporary file for the bytes, from
    which an interrupted call continues."""
    size = snapshot.size
    beside = snapshot.result.get("rollouts", {}).get("objects", [])  # what a run that goes on from it needs, too
    try:
        for name in (*beside, snapshot.id):
            object_id = bytes.fromhex(name)
            await source.download(snapshot.run_id, object_id, scratch, lambda done: tell(done, 2 * size))
            async with target.objects(run_id) as objects:
                await objects.put_path(scratch, known_id=object_id, progress=lambda done: tell(size + done, 2 * size))
            await asyncio.to_thread(scratch.unlink, missing_ok=True)
    finally:
        await asyncio.to_thread(scratch.unlink, missing_ok=True)


async def pin_snapshot(client: Runs, run_id: str, snapshot_id: str) -> bool:
    """Keep a snapshot as long as the run, which must be open. Returns False if the cluster does not have it."""
    async with client.objects(run_id) as objects:
        (there,) = await objects.has([bytes.fromhex(snapshot_id)])
    return there
