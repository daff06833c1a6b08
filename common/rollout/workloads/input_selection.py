"""Selects a part of the input: its first rows, or a sample of all."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blake3 import blake3

from rollout.workloads.input_files import InputFile
from rollout.workloads.input_format import InputFormat
from rollout.workloads.input_lines import Line

_NUMBER = 8


@dataclass(frozen=True, slots=True)
class Selection:
    """The first `limit` rows, or `sample` of all, in order, chosen by `seed`; 0 and 0 mean all."""

    limit: int = 0
    sample: int = 0
    seed: int = 0

    def stored(self) -> dict[str, Any]:
        """Return the keys of a run's configuration; empty for all."""
        if self.sample:
            return {"sample": self.sample, "sample_seed": self.seed}
        return {"limit": self.limit} if self.limit else {}

    def draw(self, total: int) -> Sequence[int]:
        """Return the places of the sample among `total` rows, ascending: those with the smallest hash of place and
        seed. A larger sample contains a smaller one."""
        seed = self.seed.to_bytes(_NUMBER, "little")

        def chance(place: int) -> bytes:
            return blake3(seed + place.to_bytes(_NUMBER, "little")).digest(_NUMBER)

        return sorted(heapq.nsmallest(self.sample, range(total), key=chance))


ALL = Selection()


class Selected:
    """Rows of files like those of `InputFormat.rows`, but only the selected ones, counted among themselves."""

    def __init__(self, form: InputFormat, selection: Selection) -> None:
        self._form = form
        self._selection = selection
        self._places: Sequence[int] | None = range(selection.limit) if selection.limit else None
        self._first: dict[str, int] = {}  # place of a file's first row, of a sample

    def open(self, files: Sequence[InputFile]) -> None:
        """Prepare, before the first row is read: a sample depends on the number of rows. Raises InputError."""
        if not self._selection.sample or self._places is not None:
            return
        total = 0
        for file in files:
            self._first[str(file.path)] = total
            total += sum(1 for _ in self._form.rows(file))
        self._places = self._selection.draw(total)

    def rows(self, file: InputFile, first: int = 0) -> Iterator[Line]:
        """Yield the selected rows of `file`, lazily; `first` is the index of its first among them. Raises
        InputError."""
        if self._places is None:
            yield from self._form.rows(file, first)
            return
        place = self._first.get(str(file.path), first)
        at = bisect_left(self._places, place)
        if at == len(self._places):
            return
        for line in self._form.rows(file, place):
            if line.index == self._places[at]:
                yield replace(line, index=at)
                at += 1
                if at == len(self._places):
                    return
