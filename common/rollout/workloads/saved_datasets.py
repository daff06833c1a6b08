"""Directories written by Hugging Face's `Dataset.save_to_disk` and `DatasetDict.save_to_disk`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollout.model.errors import InputError

INFO, SPLITS, _STATE = "dataset_info.json", "dataset_dict.json", "state.json"


def is_dataset(path: Path) -> bool:
    """Return whether a directory is a dataset, or contains several."""
    return (path / INFO).is_file() or (path / SPLITS).is_file()


def split_directory(path: Path, split: str | None, key: str) -> Path:
    """Return the directory of one dataset: `path`, or a split below it in a DatasetDict. `key` is the section of the
    configuration with `split`, in messages. Raises InputError."""
    if (path / SPLITS).is_file():
        try:
            splits = [str(name) for name in json.loads((path / SPLITS).read_text("utf-8"))["splits"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path / SPLITS} does not list the splits: {error}") from error
        wanted = split or (splits[0] if len(splits) == 1 else "train")
        if wanted not in splits:
            what = f'has no split "{wanted}"' if split else "has several splits"
            raise InputError(f"{key}.split: {path} {what}: set split to one of {', '.join(splits)}")
        return path / wanted
    if split is not None:
        raise InputError(f'{key}.split: {path} is one dataset without splits: remove split = "{split}"')
    return path


def arrow_files(name: str, path: Path) -> list[Path]:
    """Return the files of a dataset, in order. `name` is that of the dataset in messages. Raises InputError."""
    try:
        state: dict[str, Any] = json.loads((path / _STATE).read_text("utf-8"))
        return [path / Path(one["filename"]).name for one in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{name}: it cannot be read as a dataset: {_STATE} does not list its files: {error}"
        ) from error
