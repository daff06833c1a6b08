"""Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347, equations 7 and 9; values as in Ziegler et al.
2019, arXiv 1909.08593).

    policy:  L_t = - min(rho A, clip(rho, 1 - e, 1 + e) A)     rho = exp(log p - log p_old), of tokens
    value:   V_t = 1/2 max((v - R)^2, (clip(v, v_old - e_v, v_old + e_v) - R)^2)
    L = (sum of L_t + c V_t over learnt tokens) / (their number in the update, of all micro-batches and ranks)

A, R: `advantages.gae`, of rewards and values per token. e: epsilon, e_v: cliprange_value, c: vf_coef.

Of tokens with rho 0.5, 1, 1.5 and A 1, -1, 2, epsilon 0.2: -0.6333.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from rollout_worker.algorithms.correction import CorrectionMode, correct
from rollout_worker.algorithms.grpo import clipped_losses, importance_ratio
from rollout_worker.algorithms.policy_port import PolicyBatch, Update
from rollout_worker.algorithms.port import Loss


class Proximal:
    name: ClassVar[str] = "ppo"

    def __init__(
        self,
        *,
        epsilon: float = 0.2,
        cliprange_value: float = 0.2,
        vf_coef: float = 0.1,
        importance_sampling_correction: CorrectionMode = "off",
        importance_sampling_cap: float = 3.0,
    ) -> None:
        self.epsilon = epsilon
        self.cliprange_value = cliprange_value
        self.vf_coef = vf_coef
        self.correction: CorrectionMode = importance_sampling_correction
        self.cap = importance_sampling_cap

    def divisor(self, update: Update) -> float:
        return float(max(update.tokens, 1))

    def loss(self, logps: Tensor, mask: Tensor, batch: PolicyBatch, values: Tensor | None = None) -> Loss:
        advantages, old_values, returns = batch.advantages, batch.values, batch.returns
        if advantages is None or old_values is None or returns is None or values is None:
            raise RuntimeError("a batch of samples has no advantages, values or returns")
        old = logps.detach() if batch.old_logps is None else batch.old_logps
        ratio = importance_ratio(logps, old, mask, "token")
        corrected = correct(self.correction, self.cap, old, batch.engine_logps, mask)
        policy = clipped_losses(ratio, advantages, self.epsilon, self.epsilon) * corrected.weights * mask
        value, value_clipped = value_losses(values, old_values, returns, self.cliprange_value)
        value = value * mask
        with torch.no_grad():
            count = mask.sum().float()
            clipped = clipped_losses(ratio, advantages, self.epsilon, self.epsilon) > -ratio * advantages
            metrics = {
                "policy/approxkl_avg": (0.5 * (torch.where(mask, logps - old, 0.0) ** 2).sum(), count),
                "policy/clipfrac_avg": ((clipped & mask).sum().float(), count),
                "val/clipfrac_avg": ((value_clipped & mask).sum().float(), count),
                "val/ratio": ((ratio * mask).sum(), count),
                "loss/policy_avg": (policy.sum(), count),
                "loss/value_avg": (value.sum(), count),
            }
        total = policy.sum() + self.vf_coef * value.sum()
        return Loss(total, metrics | corrected.metrics, corrected.least, corrected.most)


def value_losses(values: Tensor, old_values: Tensor, returns: Tensor, cliprange: float) -> tuple[Tensor, Tensor]:
    """Return (losses, where the clipped value counts), all (B, T - 1)."""
    near = values.clamp(old_values - cliprange, old_values + cliprange)
    free, clipped = (values - returns) ** 2, (near - returns) ** 2
    return 0.5 * torch.maximum(free, clipped), clipped > free
