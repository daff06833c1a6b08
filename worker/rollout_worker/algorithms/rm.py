"""Reward models: a score for each sequence, learnt from pairs.

    bradley_terry:      L = - log s(c - r - m)             (Bradley and Terry 1952; margin m: Llama 2, arXiv 2307.09288)
    pairwise_logistic:  L = log(1 + exp(- k (c - r - m)))  (RankNet, Burges et al. 2005): the same with a scale k
    centring:           + a (c + r)^2                      (Eisenstein et al. 2023, arXiv 2312.09244)

c and r are the scores of the chosen and the rejected sequence, read at the last token that is no padding (by the mask:
where padding is the end-of-sequence token, its id says nothing). The mean is over all pairs of the step.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rollout_worker.algorithms.port import Algorithm, Batch, Loss, Models

Head = Literal["bradley_terry", "pairwise_logistic"]


class RewardModel(Algorithm):
    name: ClassVar[str] = "rm"
    rows: ClassVar[Literal["text", "pairs", "unpaired"]] = "pairs"
    head: ClassVar[Literal["language_model", "score"]] = "score"

    def __init__(self, head: Head = "bradley_terry", scale: float = 1.0, centre: float = 0.0) -> None:
        self.scale = 1.0 if head == "bradley_terry" else scale
        self.centre = centre

    def loss(self, models: Models, batch: Batch) -> Loss:
        scores = models.policy(batch).float()
        chosen, rejected = scores.chunk(2)
        losses = pair_losses(chosen, rejected, batch.margin, self.scale, self.centre)
        pairs = torch.tensor(float(len(chosen)))
        detached = scores.detach()
        metrics = {
            "accuracy": ((chosen > rejected).float().sum(), pairs),
            "margin": ((chosen - rejected).detach().sum(), pairs),
            "mean_reward": (detached.sum(), 2 * pairs),
        }
        return Loss(losses.sum(), metrics, {"min_reward": detached.min()}, {"max_reward": detached.max()})


def pair_losses(
    chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, scale: float = 1.0, centre: float = 0.0
) -> Tensor:
    """Return (pairs,) losses of scores (pairs,) and margins (pairs,)."""
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    losses = -logsigmoid(scale * difference)
    return losses + centre * (chosen + rejected) ** 2 if centre else losses


def last_token(scores: Tensor, attention_mask: Tensor) -> Tensor:
    """Return (sequences,) of `scores` (sequences, tokens): at the last token that is not padding, which is on the
    right."""
    last = attention_mask.sum(1) - 1
    return scores.gather(1, last[:, None]).squeeze(1).clone()  # what a model sharded by FSDP returns must be no view
