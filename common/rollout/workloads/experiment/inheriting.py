"""Copies committed slots of another run to a fork of it, up to the slot from which the fork continues."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rollout.model.errors import ConfigError, StorageError
from rollout.workloads.experiment.contracts import sha256_of
from rollout.workloads.experiment.layout import (
    ARTIFACTS,
    CHAINS,
    EVIDENCE,
    FACTS,
    PREDICTIONS,
    PRUNED,
    SCORES,
    TRIALS,
    trial_directory,
)
from rollout.workloads.experiment.schedule import trial_id
from rollout.workloads.json_form import JsonObject, dump_line
from rollout.workloads.output import write_atomically

INHERITED = "inherited.jsonl"


@dataclass(frozen=True, slots=True)
class Inherited:
    """`slots` is the number of inherited slots, from the first. `sha256` is that of the file `INHERITED` with their
    lines."""

    run_id: str
    slots: int
    sha256: str

    def to_json(self) -> JsonObject:
        return asdict(self)


def inherit(parent: Path, run_id: str, slots: int, directory: Path) -> Inherited:
    """Copy the first `slots` of the run in `parent` to `directory`. Rows keep the id of their commit. Raises
    ConfigError if fewer are committed. Blocking."""
    rows = [one for one in rows_of(parent, TRIALS) if one["schedule_index"] < slots]
    if len(rows) < slots:
        raise ConfigError(f"--from: {len(rows)} slots of {parent} are committed, and {slots} are to be taken over")
    names = {trial_id(index) for index in range(slots)}
    lines: list[bytes] = []
    for name in (*FACTS, EVIDENCE, PRUNED, CHAINS, PREDICTIONS, SCORES):
        for row in rows_of(parent, name):
            if (row.get("trial_id") or row["ids"]["trial_id"]) in names:
                lines.append(dump_line({"file": name, "row": row}))
    directory.mkdir(parents=True)
    for name in names:
        _copy(parent / trial_directory(name), directory / trial_directory(name))
    _copy(parent / ARTIFACTS, directory / ARTIFACTS)
    data = b"".join(lines)
    write_atomically(directory / INHERITED, data)
    return Inherited(run_id, slots, sha256_of(data))


def inherited_lines(directory: Path, inherited: Inherited, run_id: str) -> Iterator[tuple[str, JsonObject]]:
    """Yield (file, row) as rows of the run `run_id`. Raises StorageError if the inherited files have changed.
    Blocking."""
    path = directory / INHERITED
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StorageError(f"{path} is needed, and cannot be read: {error.strerror or error}") from error
    if sha256_of(data) != inherited.sha256:
        raise StorageError(f"{path} is needed, and was edited or replaced: put it back, or fork the run once more")
    for line in data.splitlines():
        found: JsonObject = json.loads(line)
        row: JsonObject = found["row"]
        own = {**row, "run_id": run_id} if "run_id" in row else {**row, "ids": {**row["ids"], "run_id": run_id}}
        yield found["file"], own


def rows_of(run: Path, name: str) -> Iterator[JsonObject]:
    """Yield the rows of a run's file; none if it is missing. Blocking."""
    try:
        with (run / name).open("rb") as file:
            for line in file:
                yield json.loads(line)
    except FileNotFoundError:
        return


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, copy_function=link, dirs_exist_ok=True)


def link(source: str | Path, target: str | Path) -> None:
    """Hard-link the file, or copy it where that is not possible: nothing writes into either."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
