"""Tokenised data: one file of flat arrays, the same bytes for the same rows, tokenizer and settings.

A *row* is one sequence, of a pair two. A *unit* is what the sampler draws: a row, or with packing several rows that
share a sequence.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from rollout.workloads.json_form import JsonObject
from rollout.workloads.train.encode import FAULTS, Encoded

SHOWN = 20
"""Rows named for each fault."""


@dataclass(slots=True)
class Dataset:
    """`ids`, `learnt`: (tokens,). `offsets`: (sequences + 1,), where each begins. `prompts`: (sequences,), tokens
    before the completion. `labels`, `margins`, `numbers`: (rows,); `numbers` are places in the input, counted from 1.
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
        """(ids, learnt, tokens of the prompt)."""
        index = row * self.width + which
        at = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return self.ids[at], self.learnt[at], int(self.prompts[index])

    def supervised(self, row: int) -> int:
        """Tokens of a row that its loss counts: nothing comes before the first."""
        return sum(int(self.sequence(row, which)[1][1:].sum()) for which in range(self.width))

    def save(self, path: Path) -> None:
        save_file({name: np.ascontiguousarray(getattr(self, name)) for name in _ARRAYS}, path)

    @classmethod
    def load(cls, path: Path) -> Dataset:
        with safe_open(path, framework="np") as file:
            return cls(**{name: file.get_tensor(name) for name in _ARRAYS})


_ARRAYS = tuple(Dataset.__dataclass_fields__)


@dataclass(slots=True)
class Report:
    """What became of the rows; `data-report.json`."""

    rows: int = 0
    kept: int = 0
    dropped: int = 0
    tokens: int = 0
    supervised: int = 0
    longest: int = 0
    units: int = 0
    faults: Counter[str] = field(default_factory=Counter[str])
    """Rows with each fault."""
    where: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """The first rows with each, counted from 1."""

    def count(self, number: int, encoded: Encoded) -> None:
        self.rows += 1
        for fault in encoded.faults:
            self.faults[fault] += 1
            named = self.where.setdefault(fault, [])
            if len(named) < SHOWN:
                named.append(number)

    def to_json(self) -> JsonObject:
        return {
            "rows": self.rows,
            "kept": self.kept,
            "dropped": self.dropped,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised,
            "longest": self.longest,
            "sequences": self.units,
            "faults": {fault: self.faults[fault] for fault in FAULTS},
            "first_rows": {fault: self.where[fault] for fault in FAULTS if fault in self.where},
        }


def build(
    encoded: Iterable[tuple[int, Encoded]], policies: Mapping[str, str], pack_to: int | None = None
) -> tuple[Dataset, Report]:
    """Rows of (number, encoded) whose faults their policies let pass; with `pack_to`, packed into that many tokens.

    Rows with a fault whose policy is `error` are left out too: the report says which there are.
    """
    report, flat = Report(), _Flat()
    for number, one in encoded:
        report.count(number, one)
        if any(policies[fault] != "keep" for fault in one.faults):
            report.dropped += 1
            continue
        flat.add(number, one)
    lengths = flat.lengths
    units = [[row] for row in range(len(flat.labels))] if pack_to is None else best_fit(lengths, pack_to)
    data = flat.dataset(units)
    report.kept, report.units, report.tokens = data.rows, data.units, len(data.ids)
    report.supervised = sum(data.supervised(row) for row in range(data.rows))
    report.longest = max(lengths, default=0)
    return data, report


class _Flat:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.learnt: list[bool] = []
        self.offsets = [0]
        self.prompts: list[int] = []
        self.labels: list[bool] = []
        self.margins: list[float] = []
        self.numbers: list[int] = []

    def add(self, number: int, one: Encoded) -> None:
        for sequence in one.sequences:
            self.ids += sequence.ids
            self.learnt += sequence.learnt
            self.offsets.append(len(self.ids))
            self.prompts.append(sequence.prompt)
        self.labels.append(one.label)
        self.margins.append(one.margin)
        self.numbers.append(number)

    @property
    def lengths(self) -> list[int]:
        return [after - before for before, after in zip(self.offsets, self.offsets[1:], strict=False)]

    def dataset(self, units: Sequence[Sequence[int]]) -> Dataset:
        ends = np.cumsum([0, *map(len, units)], dtype=np.int64)
        return Dataset(
            ids=np.array(self.ids, np.int32),
            learnt=np.array(self.learnt, np.uint8),
            offsets=np.array(self.offsets, np.int64),
            prompts=np.array(self.prompts, np.int32),
            labels=np.array(self.labels, np.uint8),
            margins=np.array(self.margins, np.float32),
            numbers=np.array(self.numbers, np.int64),
            unit_offsets=ends,
            unit_rows=np.array([row for unit in units for row in unit], np.int64),
        )


def best_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Rows into sequences of at most `size` tokens: longest first, each where it leaves the least room (best-fit
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


def faults_to_tell(report: Report, policies: Mapping[str, str]) -> list[str]:
    """A line for each fault whose policy is `error`, with the rows and what to do."""
    lines: list[str] = []
    for fault in FAULTS:
        count = report.faults[fault]
        if count and policies[fault] == "error":
            named = ", ".join(map(str, report.where[fault][:5]))
            more = f" and {count - 5:,} more" if count > 5 else ""
            lines.append(
                f"{count:,} row{'s' if count > 1 else ''} with {fault} (row {named}{more}): {_REMEDY[fault]}, or set "
                f'rows.{fault} = "drop" or "keep"'
            )
    return lines


_REMEDY: dict[str, str] = {
    "no_supervised_token": "nothing in them would be learnt: look at loss_on and max_length",
    "stop_token_outside": "the model would never learn to stop: move {% endgeneration %} behind the end of the turn",
    "merged_at_seam": "the tokenizer joins the end of the prompt and the completion: end the prompt or begin the "
    "completion with a space or a newline",
    "two_bos": "the text has a beginning-of-sequence token, and the tokenizer adds one: take it out of the text",
    "too_long": "raise max_length, or shorten them (keep: they are cut off at the end)",
    "empty_completion": "remove them",
    "identical_pair": "chosen and rejected are the same: remove them",
}


def policies_of(rows: Any) -> dict[str, str]:
    """`[algorithm.KIND.rows]` by fault."""
    return {fault: getattr(rows, fault) for fault in FAULTS}
