"""The value model of PPO, combined with the policy in one module: one forward and one backward pass, one optimiser.

There is a value at each token, which rates the sequence once the token is written, so `values[:, :-1, 0]` is per token
as in `policy_port`. Its head is `score`, like that of a reward model, of which a value model may be a copy.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import torch
from rollout.workloads.train.config import TrainingSection
from torch import Tensor, nn

from rollout_worker.backends.training.models import ScoreModel, load_model

Value = Literal["head", "model"]


class ActorCriticOutput(NamedTuple):
    """`logits`: (sequences, tokens, vocabulary). `values`: (sequences, tokens, 1), float32."""

    logits: Tensor
    values: Tensor


class ValueHead(nn.Module):
    """A critic that reads the policy's last hidden state. Its gradient flows into the policy."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        hidden = int(config.get_text_config().hidden_size)
        self.score = nn.Linear(hidden, 1, bias=False)
        nn.init.normal_(self.score.weight, std=hidden**-0.5)


class ActorCritic(nn.Module):
    """`policy` and `critic` keep the names of their weights: a snapshot has `names(policy)`, and `names(critic)` in a
    file of its own. Only `policy` is exported."""

    def __init__(self, policy: Any, critic: ValueHead | ScoreModel) -> None:
        super().__init__()
        self.policy = policy
        self.critic = critic
        self.config: Any = policy.config
        kinds = (getattr(part, "_no_split_modules", None) or () for part in (policy, critic))
        self._no_split_modules = sorted({kind for part in kinds for kind in part})  # what FSDP gathers at a time

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **options: Any) -> ActorCriticOutput:
        given: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, **options}
        if isinstance(self.critic, ScoreModel):
            hidden: Tensor = self.critic.model(**given).last_hidden_state
            logits: Tensor = self.policy(**given).logits
        else:
            found = self.policy(**given, output_hidden_states=True)
            hidden, logits = found.hidden_states[-1], found.logits
        with torch.autocast(hidden.device.type, enabled=False):
            return ActorCriticOutput(logits, self.critic.score(hidden.float()))

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Disable the policy's adapter; the policy is then its own reference."""
        return self.policy.disable_adapter()

    def get_input_embeddings(self) -> nn.Module:
        return self.policy.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        """Return the policy's output layer, by which FSDP detects tied embeddings."""
        return self.policy.get_output_embeddings()


def make_critic(
    value: Value, policy: Any, name: str, settings: TrainingSection, revision: str | None = None
) -> ValueHead | ScoreModel:
    """Make a critic. `name` is the directory or Hugging Face name of the model to copy, with its head if it is a reward
    model. A new head depends on the seed alone. Raises AttemptError if the model cannot be loaded."""
    library: Any = torch  # whose types of these are partly unknown
    with library.random.fork_rng(devices=[]):
        library.manual_seed(settings.seed)
        if value == "head":
            return ValueHead(policy.config)
        critic = load_model(name, settings, "score", revision)
    assert isinstance(critic, ScoreModel)
    return critic
