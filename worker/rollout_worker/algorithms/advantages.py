"""Advantages: how much better than expected a sample, or each of its tokens, was.

Shapes: P prompts of a step, G samples of each; B samples of T places, `mask` True where the policy generated a token
that is learnt. Results are 0 elsewhere. Everything is computed in float64 and has no gradient.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rollout_worker.algorithms.port import AllReduce

ScaleRewards = Literal["group", "batch", "none"]
SAME = 1e-8
"""A standard deviation up to this counts as 0, as in TRL: the rest is rounding."""


@torch.no_grad()
def group_advantages(
    rewards_PG: Tensor, scale_rewards: ScaleRewards = "group", eps: float = 1e-4
) -> tuple[Tensor, float]:
    """((P, G) advantages, share of groups whose rewards are all the same) of the rewards of a whole step, NaN where a
    sample is dropped.

        A = (r - mean of the group) / (standard deviation + eps)     of the group, of the batch, or A = r - mean

    (Shao et al. 2024, arXiv 2402.03300, section 4.1.2; none: Liu et al. 2025, arXiv 2503.20783.) With n - 1, over what
    is not NaN. Exactly 0 in a group that has no variance, such as of one sample, and of what is dropped. A group of
    which all is dropped is not counted. r = 1, 0, 0, 1: A = +-0.8659.
    """
    rewards = rewards_PG.double()
    known = ~rewards.isnan()
    count = known.sum(1, keepdim=True)
    centred = torch.where(known, rewards - rewards.nansum(1, keepdim=True) / count, 0.0)
    deviation = ((centred**2).sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    least = rewards.masked_fill(~known, torch.inf).amin(1, keepdim=True)
    most = rewards.masked_fill(~known, -torch.inf).amax(1, keepdim=True)
    same = (deviation <= SAME) | (least == most)
    if scale_rewards == "group":
        scaled = centred / (deviation + eps)
    elif scale_rewards == "batch":
        every = rewards[known]
        scaled = centred / ((every.std() if len(every) > 1 else every.new_zeros(())) + eps)
    else:
        scaled = centred
    groups = int((count > 0).sum())
    share = int((same & (count > 0)).sum()) / groups if groups else 0.0
    return torch.where(same, 0.0, scaled).to(rewards_PG.dtype), share


@torch.no_grad()
def token_rewards(
    scores_B: Tensor, logps_BT: Tensor, reference_logps_BT: Tensor | None, mask_BT: Tensor, kl_coef: float
) -> Tensor:
    """Return (B, T) rewards: the score at the last trained token, minus kl_coef (log p - log p_ref) at each.

    KL estimate k1: Ziegler et al. 2019, arXiv 1909.08593, equation 2. `logps_BT` is of the version that drew the
    tokens. NaN scores mark dropped samples.
    """
    kept = mask_BT & ~scores_B.isnan()[:, None]
    rewards = torch.zeros_like(logps_BT, dtype=torch.float64)
    if reference_logps_BT is not None:
        rewards = torch.where(kept, -kl_coef * (logps_BT.double() - reference_logps_BT.double()), 0.0)
    last = kept & (kept.flip(1).cumsum(1).flip(1) == 1)
    return (rewards + torch.where(last, scores_B.double()[:, None], 0.0)).to(logps_BT.dtype)


@torch.no_grad()
def gae(rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2015, arXiv 1506.02438, equation 16): (advantages, returns).

        delta_t = r_t + gamma V_t' - V_t        A_t = delta_t + gamma lam A_t'        R_t = A_t + V_t

    t' is the next *learnt* token: what an environment wrote in between is no step of the policy. After the last one
    V = 0. Returns are those of the advantages before `whiten`. gamma 1, lam 0, V = 1, 2, 3, r = 0, 0, 5: A = 1, 1, 2.
    """
    rewards, values = rewards_BT.double(), values_BT.double()
    advantages = torch.zeros_like(values)
    later = next_value = torch.zeros_like(values[:, 0])
    for t in range(values.shape[1] - 1, -1, -1):
        here = mask_BT[:, t]
        advantage = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * later
        later = torch.where(here, advantage, later)
        next_value = torch.where(here, values[:, t], next_value)
        advantages[:, t] = torch.where(here, advantage, 0.0)
    returns = torch.where(mask_BT, advantages + values, 0.0)
    return advantages.to(values_BT.dtype), returns.to(values_BT.dtype)


@torch.no_grad()
def whiten(values_BT: Tensor, mask_BT: Tensor, all_reduce: AllReduce, *, shift_mean: bool = True) -> Tensor:
    """Return (B, T) with mean 0 and variance 1 over what the masks of *all ranks* include; with `shift_mean` False the
    mean is kept. Every rank calls it at once. The variance is with n - 1, and 1e-8 is added to it, as in TRL's
    masked_whiten."""
    values = torch.where(mask_BT, values_BT, 0.0).double()
    total, count = all_reduce(torch.stack([values.sum(), mask_BT.sum().double()])).unbind()
    mean = total / count.clamp(min=1)
    centred = torch.where(mask_BT, values - mean, 0.0)
    variance = all_reduce((centred**2).sum()) / (count - 1).clamp(min=1)
    whitened = centred * torch.rsqrt(variance + 1e-8)
    if not shift_mean:
        whitened = torch.where(mask_BT, whitened + mean, 0.0)
    return whitened.to(values_BT.dtype)
