"""The interface of an algorithm: rows to a loss. Everything else about training is in the engine.

The engine divides. An algorithm returns *sums* over the rows of a micro-batch, and what each row adds to the divisor of
the step. The engine knows the rows of the whole step on all ranks before it begins (the sampler is a pure function), so
the divisor is global from the start. A mean of means over micro-batches or ranks cannot arise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor


@dataclass(slots=True)
class Batch:
    """Rows of one micro-batch, padded on the right. Of pairs: all chosen ones first, then all rejected ones.

    `input_ids`, `attention_mask`: (sequences, tokens), int64. `labels`: the same, IGNORED where a token is not
    supervised; not shifted. `position_ids`: (sequences, tokens) where rows are packed, else None. `rows`: the ids of
    the rows, one of each pair. `desirable`: (sequences,) bool, of unpaired rows. `margin`: (pairs,) or None.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    rows: tuple[int, ...]
    position_ids: Tensor | None = None
    desirable: Tensor | None = None
    margin: Tensor | None = None


IGNORED = -100


@dataclass(slots=True)
class Loss:
    """`sum` is what is differentiated once it is divided by the step's divisor; a scalar that has a graph.

    `metrics`: name -> (numerator, denominator), scalars without a graph; both are summed over micro-batches and ranks
    before the division. Those in `least` and `most` are not divided: the smallest and the largest value.
    """

    sum: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict[str, tuple[Tensor, Tensor]])
    least: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    most: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


class Models(Protocol):
    """The models of a step as an algorithm uses them."""

    def policy(self, batch: Batch) -> Tensor:
        """Return logits (sequences, tokens, vocabulary), or scores (sequences,) of a reward model, with a graph."""
        ...

    def reference(self, batch: Batch) -> Tensor | None:
        """Return the same of the reference model, without a graph, or None without a reference."""
        ...


AllReduce = Callable[[Tensor], Tensor]
"""Returns the sum over all ranks, without a graph."""


class Algorithm(Protocol):
    name: ClassVar[str]
    rows: ClassVar[Literal["text", "pairs", "unpaired"]]
    head: ClassVar[Literal["language_model", "score"]] = "language_model"
    per_token: ClassVar[bool] = False
    """Whether the divisor of a step counts supervised tokens; otherwise it counts rows (or pairs)."""

    def prepare(self, models: Models, partners: Sequence[Batch], count: int, all_reduce: AllReduce) -> None:
        """Prepare a step, before its first micro-batch. `partners` is this rank's share of what `mismatched` asked for;
        `count` is the number of such rows on all ranks."""
        return

    def loss(self, models: Models, batch: Batch) -> Loss: ...


def token_logps(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return (log-probability of each label, 0 where it is IGNORED; mask of the others), both (sequences, tokens - 1).

    Computed in float32 whatever the dtype of the logits.
    """
    functional = torch.nn.functional
    # The labels are moved and not the logits, of which a part would be a copy.
    target = functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    losses = functional.cross_entropy(
        logits.flatten(0, 1).float(), target.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return -losses.view_as(target)[:, :-1], target[:, :-1] != IGNORED


def pair_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return metrics of implicit rewards (pairs,) under TRL's names."""
    pairs = torch.tensor(float(len(chosen)))
    return {
        "rewards/chosen": (chosen.detach().sum(), pairs),
        "rewards/rejected": (rejected.detach().sum(), pairs),
        "rewards/margins": ((chosen - rejected).detach().sum(), pairs),
        "rewards/accuracies": ((chosen > rejected).float().sum(), pairs),
    }


def means(sums: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Divide the sums; a metric whose denominator is 0 is left out."""
    return {name: (above / below).item() for name, (above, below) in sums.items() if below.item()}
