"""Identity preference optimisation (Azar et al. 2023, arXiv 2310.12036, equation 17).

    d = mean over tokens of log(policy / reference) (chosen) - the same (rejected)
    L = (d - 1 / (2 b))^2        b: beta, the paper's tau

The log-ratios are averaged over the completion's tokens, not summed: the authors' own normalisation, without which the
loss grows with the length. Each completion is divided by its own length, whatever else is in its row. The mean is over
all pairs of the step. Of one token, beta 0.1 and d = 6: 1.0.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from rollout_worker.algorithms.port import Algorithm, Batch, Loss, Models, pair_metrics
from rollout_worker.algorithms.preference import logp_metrics, sequences


class IdentityPreference(Algorithm):
    name: ClassVar[str] = "ipo"
    rows: ClassVar[Literal["text", "pairs", "unpaired"]] = "pairs"

    def __init__(self, beta: float = 0.1) -> None:
        self.beta = beta

    def loss(self, models: Models, batch: Batch) -> Loss:
        found = sequences(models, batch)
        chosen, rejected = (found.ratios / found.lengths.clamp(min=1)).chunk(2)
        total, other = found.ratios.chunk(2)
        metrics = pair_metrics(self.beta * total, self.beta * other) | logp_metrics(found)
        return Loss(pair_losses(chosen - rejected, self.beta).sum(), metrics)


def pair_losses(difference: Tensor, beta: float) -> Tensor:
    """Return (pairs,) losses of `difference` (pairs,), the d above."""
    return (difference - 1 / (2 * beta)) ** 2
