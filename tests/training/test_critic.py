"""The value model beside the policy: what it computes, what it shares, and by which names it is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rollout.model.errors import AttemptError
from rollout.workloads.train.base_config import LoraSection, TrainingSection
from rollout_worker.backends.training.critic import ActorCritic, make_critic
from rollout_worker.backends.training.models import load_model, with_adapter
from rollout_worker.backends.training.weights import names

pytestmark = pytest.mark.engine
IDS = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 0, 0]])
MASK = (IDS > 0).int()


def made(value: Any, tiny: Path, *, seed: int = 0, adapter: bool = False) -> ActorCritic:
    settings = TrainingSection.model_construct(seed=seed, attention="sdpa", disable_dropout=True)
    policy: Any = load_model(str(tiny), settings, "language_model")
    critic = make_critic(value, policy, str(tiny), settings)
    return ActorCritic(with_adapter(policy, LoraSection(), "language_model") if adapter else policy, critic)


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("value", ["head", "model"])
def test_values_are_of_the_last_hidden_state_and_logits_are_the_policys(value: str, adapter: bool, tiny: Path) -> None:
    model = made(value, tiny, adapter=adapter)
    logits, values = model(IDS, MASK, use_cache=False)
    plain = model.policy(input_ids=IDS, attention_mask=MASK, use_cache=False).logits
    assert torch.equal(logits, plain) and values.shape == (*IDS.shape, 1) and values.dtype == torch.float32
    decoder: Any = (model.policy.get_base_model() if adapter else model.policy).model
    hidden = decoder(input_ids=IDS, attention_mask=MASK).last_hidden_state
    assert torch.allclose(values, hidden @ model.critic.score.weight.T, atol=1e-6)
    values.sum().backward()
    assert model.critic.score.weight.grad is not None
    reached = any(parameter.grad is not None for parameter in model.policy.parameters())
    assert reached == (value == "head")


@pytest.mark.parametrize("value", ["head", "model"])
def test_a_new_head_is_drawn_by_the_seed_alone(value: str, tiny: Path) -> None:
    heads: list[torch.Tensor] = []
    for state, seed in ((1, 3), (2, 3), (2, 4)):
        torch.manual_seed(state)
        before = torch.get_rng_state()
        model = made(value, tiny, seed=seed)
        heads.append(model.critic.score.weight)
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[1], heads[2])


def test_names_of_weights_are_those_of_the_parts(tiny: Path) -> None:
    model, alone = made("head", tiny), made("model", tiny)
    policy = list(names(model.policy).values())
    assert "lm_head.weight" in policy and not any("critic" in name or "score" in name for name in policy)
    assert list(names(model.critic).values()) == ["score.weight"]
    copied, decoder = list(names(alone.critic).values()), cast(Any, alone.critic).model
    assert "score.weight" in copied and {f"model.{name}" for name in decoder.state_dict()} < set(copied)
    assert next(iter(names(made("head", tiny, adapter=True).policy).values())).startswith("base_model.model.")


def test_a_copy_of_a_reward_model_keeps_its_head(tiny: Path, rewarding: Path) -> None:
    settings = TrainingSection.model_construct(seed=0, attention="sdpa", disable_dropout=True)
    policy: Any = load_model(str(tiny), settings, "language_model")
    assert bool((make_critic("model", policy, str(rewarding), settings).score.weight == 1).all())


def test_a_reward_model_must_have_its_head(tiny: Path, rewarding: Path) -> None:
    settings = TrainingSection.model_construct(seed=0, attention="sdpa", disable_dropout=True)
    assert bool((cast(Any, load_model(str(rewarding), settings, "reward")).score.weight == 1).all())
    with pytest.raises(AttemptError, match="no reward model") as error:
        load_model(str(tiny), settings, "reward")
    assert error.value.error_code == "model_invalid" and not error.value.retry
