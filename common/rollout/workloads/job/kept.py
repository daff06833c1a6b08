"""Keeps what a job has of trials from runs before the one that its directory belongs to.

A job that was given more attempts, agents or tasks continues as another run in the same directory. The lines of earlier
trials are in one file next to the others, named by its own hash: from there the files are written again.
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
"""Lines by id of the trial, in hex, and by name of the file."""


def read_lines(directory: Path) -> Kept:
    """Read the files as they are, which is useful only after a collector has checked them. Blocking."""
    kept: Kept = {}
    for name in FILES:
        for line in _lines(directory / name):
            kept.setdefault(line["trial"], {})[name] = line
    return kept


def write_kept(directory: Path, kept: Kept) -> str:
    """Write a file and return its name. Blocking."""
    data = b"".join(dump_line({"trial": trial, "lines": lines}) for trial, lines in kept.items())
    name = f".kept-{blake3(data).hexdigest(16)}.jsonl"
    write_atomically(directory / name, data)
    return name


def read_kept(directory: Path, name: str) -> Kept:
    """Read the file `name`; "" is empty. Raises StorageError if it has changed. Blocking."""
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
    """Delete files of other runs, which are useless once the directory belongs to the run. Blocking."""
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
