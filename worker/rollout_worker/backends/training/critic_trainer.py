"""Training of PPO: a value model besides the policy, and advantages for each token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rollout.workloads.train.policy_config import PpoSection
from torch import Tensor

from rollout_worker.algorithms.advantages import gae, token_rewards, whiten
from rollout_worker.algorithms.policy_port import PolicyBatch
from rollout_worker.algorithms.port import IGNORED
from rollout_worker.backends.training import state as files
from rollout_worker.backends.training.critic import ActorCritic, ActorCriticOutput, make_critic
from rollout_worker.backends.training.policy_trainer import Fixed, PolicyTrainer, Row, aligned
from rollout_worker.backends.training.weights import capture_weights, load_weights


class CriticTrainer(PolicyTrainer):
    """The trainer of PPO. All samples of a step get their values, returns and advantages before its first update."""

    _divergence: float | None = None
    """Mean divergence of the step's samples from the reference, each summed over its tokens (k1)."""

    @property
    def _own(self) -> PpoSection:
        assert isinstance(self.settings, PpoSection)
        return self.settings

    def _assembled(self, model: Any) -> ActorCritic:
        settings = self._own
        critic = make_critic(settings.value, model, self.job.model, settings, settings.base_model.revision)
        return ActorCritic(model, critic)

    @property
    def policy(self) -> Any:
        return self.plain.policy

    def _capture_critic(self) -> dict[str, Tensor]:
        return capture_weights(self.plain.critic, keep=self.rank == 0)

    def _restore_critic(self, directory: Path) -> None:
        load_weights(self.plain.critic, files.load_critic(directory))

    # ---- a step

    def _step(self, step: int) -> dict[str, Any]:
        self._divergence = None
        found = super()._step(step)
        said = {} if self._divergence is None else {"objective/kl": self._divergence}
        return {**found, **said}

    def _learns(self, rows: Sequence[Row]) -> bool:
        return True  # the value model does, whatever the rewards

    @property
    def _needs_old(self) -> bool:
        return True

    def _outputs(self, batch: PolicyBatch) -> tuple[Tensor, Tensor | None]:
        found: ActorCriticOutput = self.models.outputs(batch)
        return found.logits, found.values[:, :-1, 0]

    def _fixed(self, step: int, rows: Sequence[Row]) -> list[Fixed]:
        found = super()._fixed(step, rows)
        with torch.no_grad():
            self._measure(rows, found, "values", self._values)
        width = max(row.length for row in rows) - 1
        table = {name: aligned([one[name] for one in found], width) for name in found[0]}
        mask = aligned([self._mask(row).to(table["values"].device) for row in rows], width)
        scores = torch.tensor([row.reward for row in rows], dtype=torch.float32, device=mask.device)
        settings = self._own
        if (reference := table.get("reference_logps")) is not None:
            self._divergence = float(((table["old_logps"] - reference) * mask).sum() / len(rows))
        rewards = token_rewards(scores, table["old_logps"], reference, mask, settings.kl_coef)
        if settings.whiten_rewards:
            rewards = whiten(rewards, mask, _all_here, shift_mean=False)
        advantages, returns = gae(rewards, table["values"], mask, settings.gamma, settings.lam)
        advantages = whiten(advantages, mask, _all_here)
        for place, (row, one) in enumerate(zip(rows, found, strict=True)):
            one |= {"advantages": advantages[place], "returns": returns[place]}
            row.advantage = float(advantages[place].sum() / mask[place].sum().clamp(min=1))
        return found

    def _values(self, batch: PolicyBatch) -> Tensor:
        with self.accelerator.autocast():
            values = self._outputs(batch)[1]
        assert values is not None
        return torch.where(batch.labels[:, 1:] != IGNORED, values, 0.0)

    def _mask(self, row: Row) -> Tensor:
        """Return (T - 1,): which tokens of a row are learnt."""
        return self._batch([row]).labels[0, 1:] != IGNORED


def _all_here(value: Tensor) -> Tensor:
    """Return the sum over ranks of values that each rank has in full."""
    return value
