"""Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290, equation 7), with label smoothing.

    d = log(policy / reference)(chosen) - log(policy / reference)(rejected)        sums over the completion's tokens
    sigmoid:  L = - (1 - e) log s(b d) - e log s(- b d)     b: beta, e: label_smoothing (cDPO, Mitchell 2023)
    hinge:    L = max(0, 1 - b d)                           (SLiC, Zhao et al. 2023, arXiv 2305.10425)

The mean is over all pairs of the step. Of one token, beta 0.1 and d = 6: sigmoid 0.437488, hinge 0.4.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rollout_worker.algorithms.port import Algorithm, Batch, Loss, Models, pair_metrics
from rollout_worker.algorithms.preference import logp_metrics, sequences

LossType = Literal["sigmoid", "hinge"]


class DirectPreference(Algorithm):
    name: ClassVar[str] = "dpo"
    rows: ClassVar[Literal["text", "pairs", "unpaired"]] = "pairs"

    def __init__(self, beta: float = 0.1, label_smoothing: float = 0.0, loss_type: LossType = "sigmoid") -> None:
        self.beta = beta
        self.label_smoothing = label_smoothing
        self.loss_type: LossType = loss_type

    def loss(self, models: Models, batch: Batch) -> Loss:
        found = sequences(models, batch)
        chosen, rejected = found.ratios.chunk(2)
        losses = pair_losses(chosen - rejected, self.beta, self.label_smoothing, self.loss_type)
        metrics = pair_metrics(self.beta * chosen, self.beta * rejected) | logp_metrics(found)
        return Loss(losses.sum(), metrics)


def pair_losses(difference: Tensor, beta: float, label_smoothing: float, loss_type: LossType) -> Tensor:
    """Return (pairs,) losses of `difference` (pairs,), the d above."""
    logits = beta * difference
    if loss_type == "hinge":
        return torch.relu(1 - logits)
    return -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)
