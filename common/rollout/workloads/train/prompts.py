"""Prompts of reinforcement learning: one file of JSON lines with the token ids and the row of each.

The first item of a run writes it, and each segment draws from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.workloads.json_form import JsonObject, canonical


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt. `number` is its position in the input, from 1. `prompt` is text or messages as written. `columns` are
    the other keys of its row."""

    number: int
    ids: list[int]
    prompt: Any
    columns: JsonObject


class Prompts:
    """The prompts of a file, read one by one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places = [0]
        with path.open("rb") as file:
            for line in file:
                self._places.append(self._places[-1] + len(line))

    def __len__(self) -> int:
        return len(self._places) - 1

    def __getitem__(self, index: int) -> Prompt:
        with self._path.open("rb") as file:
            file.seek(self._places[index])
            found = json.loads(file.read(self._places[index + 1] - self._places[index]))
        return Prompt(found["number"], found["ids"], found["prompt"], found["columns"])

    @staticmethod
    def save(prompts: Iterable[Prompt], path: Path) -> None:
        with path.open("wb") as file:
            for one in prompts:
                line = {"number": one.number, "ids": one.ids, "prompt": one.prompt, "columns": one.columns}
                file.write(canonical(line) + b"\n")
