"""Makes the optimiser and its schedule from libraries."""

from __future__ import annotations

from typing import Any

import torch
from rollout.workloads.train.base_config import OptimizerSection
from torch import nn
from transformers import optimization


def make_optimizer(model: nn.Module, section: OptimizerSection, *, sharded: bool = False) -> torch.optim.Optimizer:
    """Return an optimiser of the trained parameters, ordered by name. Biases and norms have no weight decay.

    `sharded` means by FSDP, whose tensors torch's fused SGD does not support.
    """
    trained = sorted((name, p) for name, p in model.named_parameters() if p.requires_grad)
    decayed = [p for _, p in trained if p.ndim > 1]
    others = [p for _, p in trained if p.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": section.weight_decay, "decays": True},
        {"params": others, "weight_decay": 0.0, "decays": False},
    ]
    groups = [group for group in groups if group["params"]]
    if section.kind == "sgd":
        return torch.optim.SGD(groups, lr=section.lr, momentum=section.momentum, fused=None if sharded else True)
    kind = torch.optim.AdamW if section.kind == "adamw" else torch.optim.Adam
    return kind(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True)


def make_schedule(optimizer: torch.optim.Optimizer, section: OptimizerSection, steps: int) -> Any:
    """Return a learning rate schedule over `steps` steps."""
    warmup = section.warmup_steps or round(section.warmup_ratio * steps)
    special = {"min_lr_rate": section.min_lr_ratio} if section.schedule == "cosine_with_min_lr" else None
    library: Any = optimization
    return library.get_scheduler(section.schedule, optimizer, warmup, steps, scheduler_specific_kwargs=special)


def follow_settings(optimizer: Any, schedule: Any, section: OptimizerSection) -> None:
    """Apply the rates of `section` to an optimiser and schedule whose state was just restored: a run that starts from
    another's state may have other settings. Equal settings change no bit."""
    rates: list[float] = []
    for group, factor in zip(optimizer.param_groups, schedule.lr_lambdas, strict=True):
        group["initial_lr"], group["lr"] = section.lr, section.lr * factor(schedule.last_epoch)
        group["weight_decay"] = section.weight_decay if group["decays"] else 0.0
        if section.kind == "sgd":
            group["momentum"] = section.momentum
        else:
            group["betas"], group["eps"] = section.betas, section.eps
        rates.append(group["lr"])
    schedule.base_lrs = [section.lr] * len(rates)
    schedule._last_lr = rates  # pyright: ignore[reportPrivateUsage] - as `step` leaves it
