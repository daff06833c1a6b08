"""Rows that share a sequence: attention masks by the model's own rules, and a check that packed rows compute what each
computes alone.

Masks separate rows in attention. Layers with a recurrent state or a convolution carry it from row to row, and some
models ignore the masks or positions that they are given. Names do not tell which models do so: it is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, groupby, repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rollout.model.errors import AttemptError
from rollout.workloads.train.dataset import Dataset
from torch import Tensor
from transformers import masking_utils

from rollout_worker.algorithms.port import Batch
from rollout_worker.backends.training.collate import Collator, Tokens
from rollout_worker.backends.training.faults import ran_out_of_memory

_SHORT = 4
"""Tokens of the first rows in the check: leaks from one row to the next are largest at its beginning."""
_LEAST, _MOST, _NOISE = 5e-5, 1e-2, 20.0
"""Tolerance for the relative difference of a token's logits: `_NOISE` times that of the first row, which has nothing
before it, between `_LEAST` and `_MOST`. A random LFM2 of width 32, the smallest leak measured, differs by 2e-4;
rounding in float32 by 4e-7."""
_TOKENS = 20
"""One token in this many may differ by more, and one of a shorter row: rounding may route it to another expert."""


def packed_masks(config: Any, position_ids: Tensor) -> Any:
    """Return the `attention_mask` for packed rows that a model with this configuration accepts: a mask (sequences, 1,
    tokens, tokens), or one for each kind of its layers, with windows and chunks of that kind counted within each row.

    `position_ids`: (sequences, tokens); a row begins wherever a position does not follow the previous one.
    """
    library: Any = masking_utils
    shape_only = torch.empty(*position_ids.shape, 0, device=position_ids.device)
    place = torch.arange(position_ids.shape[1], device=position_ids.device)  # before transformers 5.3 it is required
    return library.create_masks_for_generate(
        config, shape_only, None, past_key_values=None, position_ids=position_ids, cache_position=place
    )


def check_packing(policy: Callable[[Batch], Tensor], model_type: str, collator: Collator, *data: Dataset) -> None:
    """Compare logits of packed rows with those of the same rows alone. Raises AttemptError if they differ.

    The rows are as long as the longest in `data`, and together as long as the longest shared sequence, so that every
    window and chunk of the model that affects them is tested.
    """
    row, sequence = (max(sizes) for sizes in zip(*map(_sizes, data), strict=True))
    if not sequence:
        return
    ids = np.resize(data[0].ids, sequence)
    ends = np.cumsum(list(_lengths(row, sequence)))
    rows: list[Tokens] = [(part, np.ones(len(part), np.bool_)) for part in np.split(ids, ends[:-1])]
    alone: list[Tensor] = []
    for _, same in groupby(rows, key=lambda one: len(one[0])):
        alone += policy(collator.padded(list(same))).unbind()
    try:
        packed = policy(collator.packed([rows]))[0, :sequence]
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        if ran_out_of_memory(error):
            raise
        raise _refused(model_type, f"it cannot take packed rows ({type(error).__name__}: {error})") from error
    errors = [_errors(packed[end - len(one) : end], one) for end, one in zip(ends, alone, strict=True)]
    tolerance = min(max(_LEAST, _NOISE * float(errors[0].max())), _MOST)
    if any(int((one > tolerance).sum()) > max(1, len(one) // _TOKENS) for one in errors):
        most = max(float(one.max()) for one in errors)
        raise _refused(
            model_type,
            f"packed rows give other logits than the same rows alone (by up to {most:.2g} of their size): its layers "
            "do not keep rows apart",
        )


def _refused(model_type: str, why: str) -> AttemptError:
    message = f'packing: this model ({model_type}) cannot be trained on packed rows: {why}: set packing = "off"'
    return AttemptError(message, code="bad_run_config", retry=False)


def _sizes(data: Dataset) -> tuple[int, int]:
    """Return the tokens of the longest row, and of the longest sequence that several rows share, 0 if there is none."""
    lengths: NDArray[np.int64] = np.diff(data.offsets)
    shared = np.diff(data.unit_offsets) > 1
    sums = np.add.reduceat(lengths[data.unit_rows], data.unit_offsets[:-1])
    return int(lengths.max()), int(sums[shared].max(initial=0))


def _lengths(row: int, sequence: int) -> Iterator[int]:
    """Yield lengths, at most `row` tokens, of rows that fill a sequence: two short ones, then long ones."""
    short = min(_SHORT, row, sequence // 2)
    for length in chain((short, short, max(1, row // 3)), repeat(row)):
        if not sequence:
            return
        yield min(length, sequence)
        sequence -= min(length, sequence)


def _errors(packed: Tensor, alone: Tensor) -> Tensor:
    """Return (tokens,): the difference of the logits relative to their spread."""
    library: Any = torch.linalg
    spread: Tensor = library.vector_norm(alone - alone.mean(-1, keepdim=True), dim=-1)
    return library.vector_norm(packed - alone, dim=-1) / (spread + torch.finfo(torch.float32).tiny)
