"""Tokenised data in one file of flat arrays, which has the same bytes for the same rows, tokenizer and settings.

A *row* has one sequence, or two if it is a pair. A *unit* is what the sampler draws: a row, or with packing several
rows that share a sequence.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import numpy as safetensors

from rollout.workloads.train.encode import Encoded
from rollout.workloads.train.report import Place, Report


@dataclass(slots=True)
class Dataset:
    """`ids`, `learnt`: (tokens,). `offsets`: (sequences + 1,), start of each sequence. `prompts`: (sequences,), tokens
    before the completion. `labels`, `margins`, `numbers`: (rows,); `numbers` are positions in the input, from 1.
    `unit_offsets`: (units + 1,) into `unit_rows`: (rows,). `width`: sequences of a row."""

    ids: NDArray[np.int32]
    learnt: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    prompts: NDArray[np.int32]
    labels: NDArray[np.uint8]
    margins: NDArray[np.float32]
    numbers: NDArray[np.int64]
    unit_offsets: NDArray[np.int64]
    unit_rows: NDArray[np.int64]

    @property
    def rows(self) -> int:
        return len(self.labels)

    @property
    def units(self) -> int:
        return len(self.unit_offsets) - 1

    @property
    def width(self) -> int:
        return (len(self.offsets) - 1) // max(self.rows, 1)

    def rows_of(self, unit: int) -> NDArray[np.int64]:
        return self.unit_rows[self.unit_offsets[unit] : self.unit_offsets[unit + 1]]

    def sequence(self, row: int, which: int = 0) -> tuple[NDArray[np.int32], NDArray[np.uint8], int]:
        """Return (ids, learnt, number of prompt tokens)."""
        index = row * self.width + which
        at = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return self.ids[at], self.learnt[at], int(self.prompts[index])

    def supervised(self, row: int) -> int:
        """Return the number of tokens that a row's loss counts; the first of a sequence has no predecessor."""
        return sum(int(self.sequence(row, which)[1][1:].sum()) for which in range(self.width))

    def save(self, path: Path) -> None:
        _file.save_file({name: np.ascontiguousarray(getattr(self, name)) for name in _ARRAYS}, path)

    @classmethod
    def load(cls, path: Path) -> Dataset:
        return cls(**_file.load_file(path))


_file: Any = safetensors
_ARRAYS = tuple(Dataset.__dataclass_fields__)


def build(
    encoded: Iterable[tuple[Place, Encoded]], policies: Mapping[str, str], pack_to: int | None = None
) -> tuple[Dataset, Report]:
    """Build the dataset from rows whose faults their policies allow. With `pack_to`, rows are packed into sequences of
    that many tokens.

    A row is left out if one of its faults has the policy drop; one with policy error is left out and reported.
    """
    report, flat = Report(dict(policies)), _Flat()
    for place, one in encoded:
        if report.count(place, one):
            flat.add(place.number, one)
    data = flat.dataset(pack_to)
    report.units = data.units
    return data, report


class _Flat:
    """Arrays that grow; lists of Python numbers would take ten times the memory."""

    def __init__(self) -> None:
        self.ids = array("i")
        self.learnt = bytearray()
        self.offsets = array("q", [0])
        self.prompts = array("i")
        self.labels = bytearray()
        self.margins = array("f")
        self.numbers = array("q")

    def add(self, number: int, one: Encoded) -> None:
        for sequence in one.sequences:
            self.ids.extend(sequence.ids)
            self.learnt += sequence.learnt
            self.offsets.append(len(self.ids))
            self.prompts.append(sequence.prompt)
        self.labels.append(one.label)
        self.margins.append(one.margin)
        self.numbers.append(number)

    def dataset(self, pack_to: int | None) -> Dataset:
        offsets = np.asarray(self.offsets, np.int64)  # as it is: nothing is copied
        rows = len(self.labels)
        if pack_to is None:
            ends, unit_rows = np.arange(rows + 1, dtype=np.int64), np.arange(rows, dtype=np.int64)
        else:
            units = best_fit(np.diff(offsets).tolist(), pack_to)
            ends = np.cumsum([0, *map(len, units)], dtype=np.int64)
            unit_rows = np.array([row for unit in units for row in unit], np.int64)
        return Dataset(
            ids=np.asarray(self.ids, np.int32),
            learnt=np.asarray(memoryview(self.learnt)),
            offsets=offsets,
            prompts=np.asarray(self.prompts, np.int32),
            labels=np.asarray(memoryview(self.labels)),
            margins=np.asarray(self.margins, np.float32),
            numbers=np.asarray(self.numbers, np.int64),
            unit_offsets=ends,
            unit_rows=unit_rows,
        )


def best_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Pack rows into sequences of at most `size` tokens: longest first, each where it leaves the least room (best-fit
    decreasing; at most 11/9 of the fewest sequences and a bit, Johnson 1973). Rows keep their order within one."""
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        need = lengths[row]
        at = bisect_left(free, (need, -1))
        if at < len(free):
            left, where = free.pop(at)
            bins[where].append(row)
        else:
            left, where = size, len(bins)
            bins.append([row])
        if left > need:
            insort(free, (left - need, where))
    return sorted((sorted(rows) for rows in bins), key=lambda rows: rows[0])
