"""Group-relative policy optimisation (Shao et al. 2024, arXiv 2402.03300, equation 3) and what has grown from it.

    rho = exp(log p - log p_old) of a token     p_old: the trainer's own model, of the version that drew the token
    L_t = - min(rho A, clip(rho, 1 - e, 1 + e_high) A) + b (exp(d) - d - 1),     d = log p_ref - log p: k3 (Schulman)

    epsilon_high              clip-higher (DAPO, Yu et al. 2025, arXiv 2503.14476); default: epsilon
    delta                     min(rho, delta) in the place of the first rho (dual clip, Ye et al. 2019,
                              arXiv 1912.09729): bounds the loss where A < 0; above 1 + epsilon_high
    importance_sampling_level sequence: rho = exp(mean over the sample's tokens) (GSPO, Zheng et al. 2025,
                              arXiv 2507.18071, equation 7); with advantages per token its form with a stopped gradient
                              (GSPO-token, equation 14)
    loss_type = cispo         L_t = - stopped(min(rho, e_high)) A log p (MiniMax-M1, arXiv 2506.13585, equation 4):
                              e_high is the bound itself
    loss_type                 the divisor. grpo: mean over samples, masked ones too, of their means over tokens; bnpo:
                              mean over micro-batches that have a learnt token of theirs; dapo, cispo: tokens of the
                              update; dr_grpo: samples x max_completion_length (Liu et al. 2025, arXiv 2503.20783)

A: `advantages.group_advantages`. The names are TRL's and so are the values, but for what a divisor counts: always of
all micro-batches and ranks. A log-ratio counts as 20 at most, where exp would overflow and its gradient be NaN.

Of tokens with rho 0.5, 1, 1.5 and A 1, -1, 2, epsilon 0.2: L -0.6333. rho 0.5, 1, 10 and A 1, -1, -4, delta 3: 4.1667.
GSPO of the first: rho 0.9086, L -0.6057. k3 of log p -1 and log p_ref 0, -15, -30: 0.7183, 13, 28.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from rollout_worker.algorithms.correction import CorrectionMode, correct, largest
from rollout_worker.algorithms.policy_port import PolicyBatch, Update
from rollout_worker.algorithms.port import Loss

LossType = Literal["grpo", "bnpo", "dapo", "dr_grpo", "cispo"]
Level = Literal["token", "sequence"]
_MOST = 20.0


class GroupRelative:
    name: ClassVar[str] = "grpo"

    def __init__(
        self,
        *,
        loss_type: LossType = "dapo",
        importance_sampling_level: Level = "token",
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        delta: float | None = None,
        beta: float = 0.0,
        max_completion_length: int = 256,
        importance_sampling_correction: CorrectionMode = "off",
        importance_sampling_cap: float = 3.0,
    ) -> None:
        self.loss_type: LossType = loss_type
        self.level: Level = importance_sampling_level
        self.epsilon = epsilon
        self.epsilon_high = epsilon if epsilon_high is None else epsilon_high
        self.delta = delta
        self.beta = beta
        self.max_completion_length = max_completion_length
        self.correction: CorrectionMode = importance_sampling_correction
        self.cap = importance_sampling_cap

    def divisor(self, update: Update) -> float:
        match self.loss_type:
            case "grpo":
                count = update.sequences
            case "bnpo":
                count = update.microbatches
            case "dr_grpo":
                count = update.sequences * self.max_completion_length
            case "dapo" | "cispo":
                count = update.tokens
        return float(max(count, 1))

    def loss(self, logps: Tensor, mask: Tensor, batch: PolicyBatch, values: Tensor | None = None) -> Loss:
        if batch.advantages is None:
            raise RuntimeError("a batch of samples has no advantages")
        advantages = batch.advantages[:, None] if batch.advantages.ndim == 1 else batch.advantages
        old = logps.detach() if batch.old_logps is None else batch.old_logps
        ratio = importance_ratio(logps, old, mask, self.level, per_token=advantages.shape[1] > 1)
        if self.loss_type == "cispo":
            losses = -ratio.clamp(max=self.epsilon_high).detach() * advantages * logps
        else:
            losses = clipped_losses(ratio, advantages, self.epsilon, self.epsilon_high, self.delta)
        corrected = correct(self.correction, self.cap, old, batch.engine_logps, mask)
        losses = losses * corrected.weights
        found = Loss(logps.new_zeros(()), corrected.metrics, corrected.least, corrected.most)
        if self.beta:
            if batch.reference_logps is None:
                raise RuntimeError("beta > 0: the batch has no reference_logps")
            divergence = k3(logps, batch.reference_logps, mask)
            losses = losses + self.beta * divergence
            found.metrics["kl"] = ((divergence.detach() * mask).sum(), mask.sum().float())
        found.sum = self._sum(losses * mask, mask)
        self._measure(ratio.detach(), advantages, mask, found)
        return found

    def _sum(self, losses: Tensor, mask: Tensor) -> Tensor:
        """Return what `divisor` divides, for losses (B, T - 1) that are 0 where nothing is learnt."""
        if self.loss_type == "grpo":
            return (losses.sum(1) / mask.sum(1).clamp(min=1)).sum()
        if self.loss_type == "bnpo":
            return losses.sum() / mask.sum().clamp(min=1)
        return losses.sum()

    def _measure(self, ratio: Tensor, advantages: Tensor, mask: Tensor, found: Loss) -> None:
        """Measure the shares of clipped tokens, or of clipped samples if a sample has one ratio."""
        learnt = mask.any(1)
        if ratio.shape[1] == 1:
            mask = learnt[:, None]
        count = mask.sum().float()
        if self.loss_type == "cispo":
            clipped = (ratio > self.epsilon_high) & (advantages > 0) & mask
            found.metrics["cispo_clip_ratio"] = (clipped.sum().float(), count)
            return
        low = (ratio < 1 - self.epsilon) & (advantages < 0) & mask
        high = (ratio > 1 + self.epsilon_high) & (advantages > 0) & mask
        found.metrics["clip_ratio/low_mean"] = (low.sum().float(), count)
        found.metrics["clip_ratio/high_mean"] = (high.sum().float(), count)
        found.metrics["clip_ratio/region_mean"] = ((low | high).sum().float(), count)
        lengths = mask.sum(1).clamp(min=1)
        found.least["clip_ratio/low_min"] = -largest(-(low.sum(1) / lengths), learnt)
        found.most["clip_ratio/high_max"] = largest(high.sum(1) / lengths, learnt)


def importance_ratio(
    logps: Tensor, old_logps: Tensor, mask: Tensor, level: Level, *, per_token: bool = False
) -> Tensor:
    """Return (B, T - 1), or (B, 1) for whole samples; with `per_token` also of whole samples, but each token has its
    own gradient."""
    log_ratio = torch.where(mask, logps - old_logps, 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        if per_token:
            log_ratio = log_ratio.detach() + logps - logps.detach()
    return log_ratio.clamp(max=_MOST).exp()


def clipped_losses(
    ratio: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float, delta: float | None = None
) -> Tensor:
    """Return the clipped surrogate, for ratios and advantages of matching shapes."""
    free = ratio if delta is None else ratio.clamp(max=delta)
    return -torch.minimum(free * advantages, ratio.clamp(1 - epsilon, 1 + epsilon_high) * advantages)


def k3(logps: Tensor, reference_logps: Tensor, mask: Tensor) -> Tensor:
    """Return (B, T - 1), with a graph, 0 where nothing is learnt."""
    d = torch.where(mask, reference_logps - logps, 0.0).clamp(max=_MOST)
    return d.exp() - d - 1
