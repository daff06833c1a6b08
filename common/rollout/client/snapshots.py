"""Snapshots of training runs, as their clusters keep them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rollout.client.runs import Runs
from rollout.model.errors import ConfigError, NotFoundError
from rollout.snapshots.export import export_model
from rollout.snapshots.tar import unpack
from rollout.workloads.json_form import JsonObject, lookup
from rollout.workloads.train.segment import Result

WORKLOAD = "train"
SHORT = 12
_RUNS_MAX = 1000


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`id`: blake3 of its archive, hex. `seq`: of the segment that made it. `size` in bytes."""

    id: str
    run_id: str
    run_name: str
    seq: int
    step: int
    steps: int
    size: int
    created_ms: int
    algorithm: str
    label: str
    weights: str
    fingerprint: JsonObject

    @property
    def short(self) -> str:
        return self.id[:SHORT]


async def snapshots_of(client: Runs, run_id: str) -> list[Snapshot]:
    """Those of a run that are kept, oldest first. NotFoundError."""
    status = await client.get(run_id)
    if status.spec.workload != WORKLOAD:
        return []
    found: list[Snapshot] = []
    for entry in (await client.kept(run_id)).entries:
        reply = await client.item(run_id, [entry.seq])
        _, data = await client.item_bytes(run_id, reply)
        result = Result.decode(data)
        if result.snapshot != entry.object_id.hex():
            continue  # tokens, say
        found.append(
            Snapshot(
                id=result.snapshot,
                run_id=run_id,
                run_name=status.spec.name,
                seq=entry.seq,
                step=result.step,
                steps=result.steps,
                size=result.size,
                created_ms=reply.item.at_ms,
                algorithm=result.algorithm,
                label=result.label,
                weights=result.weights,
                fingerprint=result.fingerprint,
            )
        )
    return found


async def all_snapshots(client: Runs) -> list[Snapshot]:
    """Of every run, newest run first."""
    runs = [run.spec.run_id for run in await client.list(limit=_RUNS_MAX) if run.spec.workload == WORKLOAD]
    return [one for run_id in runs for one in await snapshots_of(client, run_id)]


async def find_snapshot(client: Runs, text: str) -> Snapshot:
    """By the beginning of its id. NotFoundError; ConfigError where it may be any of several."""
    wanted = text.removeprefix("snapshot:").lower()
    found = {one.id: one for one in await all_snapshots(client) if wanted and one.id.startswith(wanted)}
    if not found:
        raise NotFoundError(f"there is no snapshot {text!r}, or it was pruned; `rollout snapshot list` lists them")
    if len(found) > 1:
        listed = "\n".join(f"  {one.short}  run {one.run_id}, step {one.step}" for one in found.values())
        raise ConfigError(f"{text!r} may be any of {len(found)} snapshots: give more of the id\n{listed}")
    return next(iter(found.values()))


async def export_snapshot(client: Runs, snapshot: Snapshot, directory: Path) -> None:
    """Into the new directory `directory`, as transformers and vLLM load it.

    ConfigError: there is one already. ObjectCorruptError, OSError.
    """
    scratch = await asyncio.to_thread(_beside, directory)
    try:
        archive, object_id = Path(scratch.name) / "state.tar", bytes.fromhex(snapshot.id)
        await client.download(snapshot.run_id, object_id, archive)
        await asyncio.to_thread(_export, archive, object_id, Path(scratch.name), directory)
    finally:
        await asyncio.to_thread(scratch.cleanup)


def _beside(directory: Path) -> TemporaryDirectory[str]:
    if directory.exists():
        raise ConfigError(f"{directory} is there already: name a new directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    return TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-")


def _export(archive: Path, object_id: bytes, scratch: Path, directory: Path) -> None:
    unpack(archive, scratch / "state", object_id)
    export_model(scratch / "state", scratch / "model")
    (scratch / "model").rename(directory)


async def prune_snapshots(client: Runs, run_id: str, keep_last: int) -> tuple[list[Snapshot], int]:
    """Let go of all but the last `keep_last` of a run: (those, objects that were freed).

    One that an open run or an item names stays until that is over.
    """
    found = await snapshots_of(client, run_id)
    gone: Sequence[Snapshot] = found[: max(0, len(found) - keep_last)]
    if not gone:
        return [], 0
    reply = await client.kept(run_id, let_go=[one.seq for one in gone])
    return list(gone), reply.objects_freed


def keep_names(stored: JsonObject, config: JsonObject, keys: Sequence[str]) -> None:
    """A run that goes on keeps the snapshots that it began with, whatever `run:ID` would stand for now."""
    for key in keys:
        old, new = lookup(stored, key), lookup(config, key)
        if old and old.get("uri") == new["uri"]:
            new |= {"snapshot": old["snapshot"], "content_id": old["content_id"]}


async def name_snapshots(client: Runs, config: JsonObject, keys: Sequence[str]) -> None:
    """Put the snapshots that these tables of `config` name into them. NotFoundError."""
    for key in keys:
        table = lookup(config, key)
        found = await _named(client, table["uri"])
        table |= {"snapshot": found.id, "content_id": found.id}


async def pin_snapshots(client: Runs, run_id: str, config: JsonObject, keys: Sequence[str]) -> None:
    """They stay as long as the run, which must be open. NotFoundError: one was pruned meanwhile."""
    for key in keys:
        name = lookup(config, key)["snapshot"]
        async with client.objects(run_id) as objects:
            (there,) = await objects.has([bytes.fromhex(name)])
        if not there:
            raise NotFoundError(f"{key}.uri: snapshot {name[:SHORT]} was pruned: name another")


async def _named(client: Runs, uri: str) -> Snapshot:
    kind, _, text = uri.partition(":")
    if kind == "snapshot":
        return await find_snapshot(client, text)
    found = await snapshots_of(client, text.upper())
    if not found:
        raise NotFoundError(f"run {text} has no snapshot: `rollout snapshot list` lists those that there are")
    return found[-1]
