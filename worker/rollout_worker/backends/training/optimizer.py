"""Optimiser and schedule, from the libraries."""

from __future__ import annotations

from typing import Any

import torch
from rollout.workloads.train.config import OptimizerSection
from torch import nn
from transformers import optimization


def make_optimizer(model: nn.Module, section: OptimizerSection) -> torch.optim.Optimizer:
    """Over the parameters that are trained, in the order of their names. Biases and norms do not decay."""
    trained = sorted((name, p) for name, p in model.named_parameters() if p.requires_grad)
    decayed = [p for _, p in trained if p.ndim > 1]
    others = [p for _, p in trained if p.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": section.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if section.kind == "sgd":
        return torch.optim.SGD(groups, lr=section.lr, momentum=section.momentum, fused=True)
    kind = torch.optim.AdamW if section.kind == "adamw" else torch.optim.Adam
    return kind(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True)


def make_schedule(optimizer: torch.optim.Optimizer, section: OptimizerSection, steps: int) -> Any:
    """Of the learning rate, over `steps` steps in all."""
    warmup = section.warmup_steps or round(section.warmup_ratio * steps)
    special = {"min_lr_rate": section.min_lr_ratio} if section.schedule == "cosine_with_min_lr" else None
    library: Any = optimization
    return library.get_scheduler(section.schedule, optimizer, warmup, steps, scheduler_specific_kwargs=special)
