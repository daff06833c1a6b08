"""Sums losses and metrics of a step over micro-batches and processes, and divides once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from rollout_worker.algorithms.port import Loss


class Sums:
    """The sums of this process. Every process adds equally often, so that all know the same names: rows that are
    present only for the sake of others (`counts` False) add nothing."""

    def __init__(self) -> None:
        self._loss = torch.zeros(())
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self._least: dict[str, Tensor] = {}
        self._most: dict[str, Tensor] = {}

    def add(self, loss: Loss, *, counts: bool = True) -> None:
        if counts:
            self._loss = self._loss + _plain(loss.sum)
        for name, (above, below) in loss.metrics.items():
            old = self._sums.get(name, (torch.zeros(()), torch.zeros(())))
            self._sums[name] = (old[0] + _plain(above), old[1] + _plain(below)) if counts else old
        nothing = torch.tensor(float("inf"))
        for name, value in loss.least.items():
            self._least[name] = torch.minimum(self._least.get(name, nothing), _plain(value) if counts else nothing)
        for name, value in loss.most.items():
            self._most[name] = torch.maximum(self._most.get(name, -nothing), _plain(value) if counts else -nothing)

    def reduced(self, accelerator: Accelerator, divisor: float) -> dict[str, float]:
        """Reduce over all processes; `loss` is divided by `divisor`, and a metric without a denominator is left out."""
        every = _stacked(accelerator, [self._loss, *(part for pair in self._sums.values() for part in pair)])
        total = every.sum(0)
        result = {"loss": float(total[0]) / max(divisor, 1)}
        for i, name in enumerate(self._sums):
            above, below = float(total[1 + 2 * i]), float(total[2 + 2 * i])
            if below:
                result[name] = above / below
        least, most = _extremes(accelerator, self._least, low=True), _extremes(accelerator, self._most, low=False)
        return result | least | most


def _plain(value: Tensor) -> Tensor:
    """Detach a value but keep it on its device: reading it would wait for all pending work."""
    return value.detach().float()


def _stacked(accelerator: Accelerator, values: list[Tensor]) -> Tensor:
    """Return (processes, values): each process's `values`, on the CPU."""
    given: Any = accelerator
    flat = torch.stack([value.to(given.device) for value in values])[None]
    return (flat if given.num_processes == 1 else given.gather(flat)).cpu()


def _extremes(accelerator: Accelerator, values: Mapping[str, Tensor], *, low: bool) -> dict[str, float]:
    """Return extremes that occurred in some micro-batch; without one they are infinite."""
    if not values:
        return {}
    every = _stacked(accelerator, list(values.values()))
    found = every.amin(0) if low else every.amax(0)
    result = {name: float(found[i]) for i, name in enumerate(values)}
    return {name: value for name, value in result.items() if math.isfinite(value)}
