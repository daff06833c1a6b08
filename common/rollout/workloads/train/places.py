"""Checks that a training run does not write into its own input."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rollout.workloads.train.data import Data

MODEL = "model"
"""Directory of the trained model below the output directory."""


def read_of(name: str, data: Data) -> Iterator[tuple[str, Path]]:
    """Yield (what it is, path) for a dataset: its files, or the directory that contains all of them."""
    whole = data.kind in ("dataset_path", "tasks_path")
    places = (path for _, path in data.tables) if whole else (path for _, path in data.files)
    return ((name, Path(place)) for place in places)


def misplaced(output: Path, model: bool, inputs: Iterable[tuple[str, Path]]) -> list[str]:
    """Return the faults of the output directory, with its key. `model` means that the trained model goes there.

    `inputs` are (what it is, its file or directory). Output inside one of them would become part of it.
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
    """Return the path as written and with links resolved, because either could be overwritten."""
    path = path.expanduser()
    return Path(os.path.abspath(path)), path.resolve()  # noqa: PTH100 - it follows no links


def _within(inner: Sequence[Path], outer: Sequence[Path]) -> bool:
    return any(one.is_relative_to(other) for one in inner for other in outer)
