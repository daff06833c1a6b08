"""Where a training run may write: nowhere among what it reads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rollout.workloads.train.data import Data

MODEL = "model"
"""Below the output directory: the trained model."""


def read_of(name: str, data: Data) -> Iterator[tuple[str, Path]]:
    """(what it is, where) of a dataset: its files, or the directory that holds all of them."""
    whole = data.kind in ("dataset_path", "tasks_path")
    places = (path for _, path in data.tables) if whole else (path for _, path in data.files)
    return ((name, Path(place)) for place in places)


def misplaced(output: Path, model: bool, inputs: Iterable[tuple[str, Path]]) -> list[str]:
    """What is wrong with the output directory, with its key; empty: nothing. `model`: it gets the trained model.

    `inputs`: (what it is, its file or directory). What lies in one of them would become part of it.
    """
    faults: list[str] = []
    directory, target = _names(output), _names(output / MODEL)
    for what, path in dict.fromkeys(inputs):
        names = _names(path)
        if _within(directory, names):
            faults.append(
                f"output.dir: {output}: the run would write into {what}, {path}, which must stay as it is: name a "
                "directory outside of it"
            )
        elif model and (_within(target, names) or _within(names, target)):
            faults.append(
                f"output.model: the trained model goes to {output / MODEL}, and {what} is there, {path}: name another "
                "output.dir"
            )
    return faults


def _names(path: Path) -> Sequence[Path]:
    """As it is written, and where links lead: either could be overwritten."""
    path = path.expanduser()
    return Path(os.path.abspath(path)), path.resolve()  # noqa: PTH100 - it follows no links


def _within(inner: Sequence[Path], outer: Sequence[Path]) -> bool:
    return any(one.is_relative_to(other) for one in inner for other in outer)
