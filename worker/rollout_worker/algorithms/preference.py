"""Shared parts of DPO and IPO: log-probabilities of pairs under the policy and its reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_worker.algorithms.port import Batch, Models, token_logps


@dataclass(slots=True)
class Sequences:
    """Values of whole sequences (sequences,): `logps` summed over their supervised tokens, `reference` likewise without
    a graph (zeros without a reference), `lengths` in supervised tokens."""

    logps: Tensor
    reference: Tensor
    lengths: Tensor

    @property
    def ratios(self) -> Tensor:
        """log(policy / reference)."""
        return self.logps - self.reference


def sequences(models: Models, batch: Batch) -> Sequences:
    logps, mask = token_logps(models.policy(batch), batch.labels)
    with torch.no_grad():
        logits = models.reference(batch)
        reference = torch.zeros(len(logps)) if logits is None else token_logps(logits, batch.labels)[0].sum(1)
    return Sequences(logps.sum(1), reference.to(logps.device), mask.sum(1))


def logp_metrics(found: Sequences) -> dict[str, tuple[Tensor, Tensor]]:
    """Return metrics of pairs under TRL's names."""
    chosen, rejected = found.logps.detach().chunk(2)
    pairs = torch.tensor(float(len(chosen)))
    return {"logps/chosen": (chosen.sum(), pairs), "logps/rejected": (rejected.sum(), pairs)}
