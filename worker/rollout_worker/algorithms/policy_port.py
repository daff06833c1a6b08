"""The interface of an algorithm of reinforcement learning: samples of the policy, with rewards, to a loss.

As elsewhere the engine divides (`port.py`): an algorithm returns sums, and the divisor of an update, which is known for
all ranks before its first micro-batch.

Shapes: B samples (prompts x samples of each, group by group), T tokens of prompt and completion. Per-token values are
(B, T - 1): at t the value for token t + 1, 0 where it is not learnt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from rollout_worker.algorithms.port import Batch, Loss


@dataclass(slots=True)
class PolicyBatch(Batch):
    """Samples of a micro-batch. `labels` are IGNORED where a token is the prompt's, an environment's, padding, or of a
    sample that is masked.

    `advantages`: (B,), or (B, T - 1) where they are per token. `engine_logps`: of the engine that drew the tokens.
    `old_logps`: of the trainer's own model, of the version that drew them; None: that is the present one, at its first
    update. `reference_logps`: None: nothing is compared. `values`, `returns`: of PPO, before the first update.
    """

    advantages: Tensor | None = None
    old_logps: Tensor | None = None
    engine_logps: Tensor | None = None
    reference_logps: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """An optimiser update, over all ranks. `sequences` counts samples, including masked ones; `tokens` learnt ones;
    `microbatches` those that have a learnt token."""

    sequences: int
    tokens: int
    microbatches: int


class PolicyAlgorithm(Protocol):
    name: ClassVar[str]

    def divisor(self, update: Update) -> float: ...

    def loss(self, logps: Tensor, mask: Tensor, batch: PolicyBatch, values: Tensor | None = None) -> Loss:
        """Return the loss. `logps` and `mask` are those of `token_logps`, of logits divided by the temperature.
        `values` are (B, T - 1), of a value model, with a graph. Metrics have TRL's names."""
        ...
