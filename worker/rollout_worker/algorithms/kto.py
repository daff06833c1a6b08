"""Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv 2402.01306, equation 7).

    r = log(policy / reference)(completion | prompt)
    z = max(0, mean over the step of log(policy / reference)(another row's completion | prompt))       without gradient
    desirable:    L = w_d (1 - s(b (r - z)))          undesirable:    L = w_u (1 - s(b (z - r)))

z estimates the divergence of policy and reference. Row i of a step is paired with the completion of row i - 1, the
first with that of the last: of the *whole* step, all micro-batches and ranks, so that neither the layout of the batch
nor the number of processes changes the loss. (Paired per device, two processes train another model than one.) Where an
epoch ends within a step, the same row may stand on both places: then it is the nearest other one before. A last step of
a single row has no other, and z is 0. The mean is over all rows of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rollout_worker.algorithms.port import Algorithm, AllReduce, Batch, Loss, Models
from rollout_worker.algorithms.preference import sequences


class KahnemanTversky(Algorithm):
    name: ClassVar[str] = "kto"
    rows: ClassVar[Literal["text", "pairs", "unpaired"]] = "unpaired"

    def __init__(self, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0) -> None:
        self.beta = beta
        self.desirable_weight = desirable_weight
        self.undesirable_weight = undesirable_weight
        self._divergence = torch.zeros(())

    def prepare(self, models: Models, partners: Sequence[Batch], count: int, all_reduce: AllReduce) -> None:
        with torch.no_grad():
            mine = [sequences(models, batch).ratios.sum() for batch in partners]
            total = all_reduce(torch.stack(mine).sum() if mine else torch.zeros(()))
            self._divergence = (total / max(count, 1)).clamp(min=0)

    def loss(self, models: Models, batch: Batch) -> Loss:
        if batch.desirable is None:
            raise RuntimeError("a batch of unpaired rows has no labels")
        found = sequences(models, batch)
        good, divergence = batch.desirable, self._divergence.to(found.logps.device)
        losses = row_losses(found.ratios, good, divergence, self.beta, self.desirable_weight, self.undesirable_weight)
        rewards, logps = self.beta * found.ratios.detach(), found.logps.detach()
        some, others = good.sum().float(), (~good).sum().float()
        metrics = {
            "rewards/chosen": (rewards[good].sum(), some),
            "rewards/rejected": (rewards[~good].sum(), others),
            "logps/chosen": (logps[good].sum(), some),
            "logps/rejected": (logps[~good].sum(), others),
            "kl": (divergence * len(good), some + others),
        }
        return Loss(losses.sum(), metrics)


def row_losses(
    ratios: Tensor,
    desirable: Tensor,
    divergence: Tensor,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """Return (rows,) losses of `ratios` (rows,), the r above, `desirable` (rows,) bool and `divergence` (), the z
    above."""
    better = beta * (ratios - divergence)
    gained = torch.where(desirable, better, -better)
    weights = torch.where(desirable, desirable_weight, undesirable_weight)
    return weights * (1 - torch.sigmoid(gained))
