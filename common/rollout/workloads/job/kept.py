"""What a job has of trials from runs before the one that its directory belongs to.

A job that was given more attempts, agents or tasks goes on as another run in the same directory. The lines of its files
that are of trials before stand in one file beside them, named by its own hash: from there the files are written again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3

from rollout.model.errors import StorageError
from rollout.workloads.job.result_files import ERRORS, PLACED, TRIALS
from rollout.workloads.json_form import JsonObject, dump_line
from rollout.workloads.output import write_atomically

FILES = (TRIALS, ERRORS, PLACED)
Kept = dict[str, dict[str, JsonObject]]
"""By the id of a trial, in hex: by the name of a file, the line that it has there."""


def read_lines(directory: Path) -> Kept:
    """Of the files as they are. Only of use after a collector has looked at them. Blocking."""
    kept: Kept = {}
    for name in FILES:
        for line in _lines(directory / name):
            kept.setdefault(line["trial"], {})[name] = line
    return kept


def write_kept(directory: Path, kept: Kept) -> str:
    """The name of the file. Blocking."""
    data = b"".join(dump_line({"trial": trial, "lines": lines}) for trial, lines in kept.items())
    name = f".kept-{blake3(data).hexdigest(16)}.jsonl"
    write_atomically(directory / name, data)
    return name


def read_kept(directory: Path, name: str) -> Kept:
    """What was written as `name`; "" is none. StorageError: it is not there as it was written. Blocking."""
    if not name:
        return {}
    path = directory / name
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _lost(path, error.strerror or str(error)) from error
    if blake3(data).hexdigest(16) not in name:
        raise _lost(path, "it was edited or replaced")
    return {entry["trial"]: entry["lines"] for entry in map(json.loads, data.splitlines())}


def forget_others(directory: Path, name: str) -> None:
    """Files of other runs are of no use once the directory is the run's. Blocking."""
    for path in directory.glob(".kept-*.jsonl"):
        if path.name != name:
            path.unlink(missing_ok=True)


def _lines(path: Path) -> Iterator[JsonObject]:
    try:
        with path.open("rb") as file:
            for line in file:
                yield json.loads(line)
    except FileNotFoundError:
        return


def _lost(path: Path, why: str) -> StorageError:
    return StorageError(
        f"{path} is needed, and {why}: it holds the results of trials of earlier runs of this job. Put it back, or "
        "begin anew with another name"
    )
