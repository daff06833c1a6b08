"""The correction for an engine that computes other probabilities than the trainer (Yao et al. 2025, "Your efficient RL
framework secretly brings you off-policy RL training"; the modes and names are TRL's).

    w = exp(log p_trainer - log p_engine)     of the version that drew the tokens, without gradient

token_*: of each token; sequence_*: of the sum over a sample's learnt tokens. *_truncate: min(w, cap); *_mask: 0 where
w > cap. The loss of a token is multiplied by w; its KL is not. A log-probability of the engine that is NaN corrects
nothing: w = 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

CorrectionMode = Literal["off", "sequence_mask", "sequence_truncate", "token_mask", "token_truncate"]


@dataclass(slots=True)
class Correction:
    """`weights`: (B, T - 1), (B, 1), or (1, 1) if nothing is corrected. The others are those of `Loss`."""

    weights: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict[str, tuple[Tensor, Tensor]])
    least: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    most: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


@torch.no_grad()
def correct(
    mode: CorrectionMode, cap: float, old_logps: Tensor, engine_logps: Tensor | None, mask: Tensor
) -> Correction:
    """Return the correction. `old_logps`, `engine_logps`, `mask`: (B, T - 1). The difference is measured in any
    mode."""
    if engine_logps is None:
        if mode != "off":
            raise RuntimeError(f"importance_sampling_correction = {mode!r}: the batch has no engine_logps")
        return Correction(old_logps.new_ones(1, 1))
    known = mask & ~engine_logps.isnan()
    difference = torch.where(known, old_logps - engine_logps, 0.0)
    name = "sampling/sampling_logp_difference"
    found = Correction(
        old_logps.new_ones(1, 1),
        {f"{name}/mean": (difference.abs().sum(), known.sum().float())},
        most={f"{name}/max": largest(difference.abs(), known)},
    )
    if mode == "off":
        return found
    if mode.startswith("sequence"):
        difference, mask = difference.sum(1, keepdim=True), mask.any(1, keepdim=True)
    weights = difference.exp()
    weights = weights.clamp(max=cap) if mode.endswith("truncate") else weights.masked_fill(weights > cap, 0.0)
    name = "sampling/importance_sampling_ratio"
    found.weights = weights
    found.metrics[f"{name}/mean"] = ((weights * mask).sum(), mask.sum().float())
    found.least[f"{name}/min"] = -largest(-weights, mask)
    found.most[f"{name}/max"] = largest(weights, mask)
    return found


def largest(values: Tensor, mask: Tensor) -> Tensor:
    """Return the largest value inside the mask; minus infinity if it is empty, which `Sums` leaves out."""
    return values.masked_fill(~mask, -torch.inf).amax()
