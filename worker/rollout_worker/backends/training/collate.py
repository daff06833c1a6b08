"""Collates units of the dataset into padded batches, deterministically."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rollout.workloads.train.dataset import Dataset

from rollout_worker.algorithms.port import IGNORED, Batch

Tokens = tuple[NDArray[np.int32], NDArray[np.bool_]]
"""(ids, which are learnt)"""


def partner(step: Sequence[int], place: int) -> int | None:
    """Return the place of the unit that the one at `place` is compared with, or None if all are the same unit."""
    return next((at for back in range(1, len(step)) if step[at := (place - back) % len(step)] != step[place]), None)


class Collator:
    """`pad` may be any id, because the mask marks padding. With `packed`, rows share a sequence and attend only to
    themselves. `longest` is the maximum number of tokens in a row, to which an exchanged completion is truncated."""

    def __init__(self, data: Dataset, pad: int, device: torch.device, *, packed: bool, longest: int) -> None:
        self.data = data
        self._longest = longest
        self._pad = pad
        self._device = device
        self.is_packed = packed

    @property
    def units(self) -> int:
        return self.data.units

    def batch(self, units: Sequence[int]) -> Batch:
        data = self.data
        rows = [data.rows_of(unit) for unit in units]
        flat = [int(row) for of_unit in rows for row in of_unit]
        if self.is_packed:
            return self.packed([[self._tokens(int(row), 0) for row in of_unit] for of_unit in rows], flat)
        sequences = [self._tokens(row, which) for which in range(data.width) for row in flat]
        batch = self.padded(sequences, flat)
        if data.width == 2:
            batch.margin = torch.tensor([float(data.margins[row]) for row in flat], device=self._device)
        else:
            batch.desirable = torch.tensor([bool(data.labels[row]) for row in flat], device=self._device)
        return batch

    def mismatched(self, places: Sequence[int], step: Sequence[int]) -> Batch:
        """Return the prompts of the rows at these places of `step`, the whole step, each with the completion of another
        row: the nearest one before it, cyclically, that is not the same row. If there is none, nothing is supervised.
        """
        data = self.data
        sequences: list[Tokens] = []
        for place in places:
            mine = int(data.rows_of(step[place])[0])
            other = partner(step, place)
            ids, _, prompt = data.sequence(mine)
            theirs, _, start = data.sequence(mine if other is None else int(data.rows_of(step[other])[0]))
            both = np.concatenate([ids[:prompt], theirs[start:]])[: self._longest]
            learnt = np.zeros(len(both), np.bool_)
            learnt[prompt:] = other is not None
            sequences.append((both, learnt))
        return self.padded(sequences, [int(data.rows_of(step[place])[0]) for place in places])

    def divisor(self, units: Sequence[int], *, per_token: bool) -> int:
        """Return what these units add to the divisor of their step."""
        data = self.data
        if not per_token:
            return sum(len(data.rows_of(unit)) for unit in units)
        return sum(data.supervised(int(row)) for unit in units for row in data.rows_of(unit))

    def tokens(self, units: Sequence[int]) -> int:
        data = self.data
        return sum(
            len(data.sequence(int(row), which)[0])
            for unit in units
            for row in data.rows_of(unit)
            for which in range(data.width)
        )

    def numbers(self, units: Sequence[int]) -> list[int]:
        """Return the rows' positions in the input, counted from 1."""
        return [int(self.data.numbers[row]) for unit in units for row in self.data.rows_of(unit)]

    def _tokens(self, row: int, which: int) -> Tokens:
        ids, learnt, _ = self.data.sequence(row, which)
        return ids, learnt.astype(np.bool_)

    def padded(self, sequences: Sequence[Tokens], rows: Sequence[int] = ()) -> Batch:
        """Pad sequences. `rows` are the rows of the dataset they belong to."""
        longest = max(len(ids) for ids, _ in sequences)
        shape = (len(sequences), longest)
        ids, mask = np.full(shape, self._pad, np.int64), np.zeros(shape, np.int64)
        labels = np.full(shape, IGNORED, np.int64)
        for i, (tokens, learnt) in enumerate(sequences):
            ids[i, : len(tokens)], mask[i, : len(tokens)] = tokens, 1
            labels[i, : len(tokens)] = np.where(learnt, tokens, IGNORED)
        return Batch(self._on(ids), self._on(mask), self._on(labels), self._numbers(rows))

    def packed(self, units: Sequence[Sequence[Tokens]], rows: Sequence[int] = ()) -> Batch:
        """Make each unit one sequence, in which positions restart with each row."""
        longest = max(sum(len(ids) for ids, _ in unit) for unit in units)
        shape = (len(units), longest)
        ids, positions = np.full(shape, self._pad, np.int64), np.zeros(shape, np.int64)
        mask, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        for i, unit in enumerate(units):
            at = 0
            for tokens, learnt in unit:
                there = slice(at, at + len(tokens))
                ids[i, there], positions[i, there], mask[i, there] = tokens, np.arange(len(tokens)), 1
                labels[i, there] = np.where(learnt, tokens, IGNORED)
                labels[i, at] = IGNORED  # nothing of its own comes before it
                at += len(tokens)
        return Batch(self._on(ids), self._on(mask), self._on(labels), self._numbers(rows), self._on(positions))

    def _on(self, array: NDArray[np.int64]) -> torch.Tensor:
        return _tensor(array).to(self._device)

    def _numbers(self, rows: Sequence[int]) -> tuple[int, ...]:
        return tuple(int(self.data.numbers[row]) for row in rows)


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    library: Any = torch
    return library.from_numpy(array)
