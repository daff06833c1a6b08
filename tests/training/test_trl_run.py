"""A run of 20 steps beside TRL's GRPOTrainer: TRL gets the samples that our policy drew, scores them and learns from them
with its own code. TRL 1.16 has no trainer of PPO: what stands beside other code of PPO are its losses."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import policy_rewards
import pytest
import torch
from policy_rig import PolicyRig
from policy_tasks import ASK, DIGITS, GRPO, Start
from rollout_worker.backends.training.policy_trainer import Row
from training_rig import make_small

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

STEPS, PROMPTS, GENERATIONS = 20, 4, 4
SETTINGS: dict[str, Any] = GRPO | {
    "prompts_per_step": PROMPTS, "num_generations": GENERATIONS, "budget": {"max_steps": STEPS},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "defaults": {"optimizer": {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 3}},
    "KL, two updates": {
        "beta": 0.1, "num_iterations": 2, "loss_type": "dr_grpo", "scale_rewards": "batch", "epsilon_high": 0.28,
        "optimizer": {"lr": 1e-3, "schedule": "constant", "weight_decay": 0.1}, "temperature": 0.9,
    },
}  # fmt: skip
SAME = {
    "max_completion_length", "beta", "num_iterations", "loss_type", "scale_rewards", "epsilon_high", "temperature"
}  # fmt: skip


@dataclass
class Run:
    """Figures by step."""

    losses: list[float]
    rewards: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    samples: list[list[Row]] = field(default_factory=list[list[Row]])

    def apart(self, other: Run) -> float:
        """The largest difference of a weight."""
        return max(float((tensor - other.weights[name]).abs().max()) for name, tensor in self.weights.items())


def ours(start: Start, directory: Path, settings: dict[str, Any]) -> Run:
    rig, samples, metrics = PolicyRig("grpo", start, directory, settings), list[list[Row]](), list[dict[str, Any]]()
    trainer = rig.trainer()
    for one in rig.steps(trainer, 0, STEPS):
        metrics.append(one)
        samples.append(trainer._rows)
    rig.close()
    losses, rewards, norms = ([one[name] for one in metrics] for name in ("loss", "reward", "grad_norm"))
    return Run(losses, rewards, norms, trainer.policy.state_dict(), samples)


def theirs(start: Start, directory: Path, settings: dict[str, Any], samples: list[list[Row]]) -> Run:
    """Each of their steps is an update."""
    trl, datasets, transformers = map(importlib.import_module, ("trl", "datasets", "transformers"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(start.model)
    prompts = [tokenizer.decode(row.prompt) for step in samples for row in step[::GENERATIONS]]
    optimizer, updates, given = settings["optimizer"], settings.get("num_iterations", 1), iter(samples)

    def drawn(asked: list[str], trainer: Any) -> dict[str, Any]:
        rows = next(given)
        ids = [row.prompt for row in rows]
        assert tokenizer(asked)["input_ids"] == ids
        return {"prompt_ids": ids, "completion_ids": [row.ids for row in rows], "logprobs": None}

    arguments = trl.GRPOConfig(
        output_dir=str(directory), report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False,
        dataloader_pin_memory=False, disable_tqdm=True, save_strategy="no", logging_steps=1, shuffle_dataset=False,
        max_steps=STEPS * updates, num_generations=GENERATIONS, per_device_train_batch_size=PROMPTS * GENERATIONS,
        learning_rate=optimizer["lr"], lr_scheduler_type=optimizer["schedule"], max_grad_norm=1.0,
        warmup_steps=optimizer.get("warmup_steps", 0), weight_decay=optimizer.get("weight_decay", 0.0),
        use_bias_correction_kl=False, **{name: settings[name] for name in SAME & settings.keys()},
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=str(start.model), args=arguments, processing_class=tokenizer, rollout_func=drawn,
        reward_funcs=[policy_rewards.exact, policy_rewards.digits],
        train_dataset=datasets.Dataset.from_list(
            [{"prompt": prompt, "answer": "".join(sorted(prompt[:-1]))} for prompt in prompts]
        ),
    )  # fmt: skip
    trainer.train()
    history, of_steps = trainer.state.log_history, range(0, STEPS * updates, updates)
    losses, norms = ([one[name] for one in history if name in one] for name in ("loss", "grad_norm"))
    return Run(
        [sum(losses[first : first + updates]) / updates for first in of_steps],
        [one["reward"] for one in history if "reward" in one],
        [max(norms[first : first + updates]) for first in of_steps],
        trainer.model.state_dict(),
    )


@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_are_those_of_trl(tmp_path: Path, case: str) -> None:
    make_small(tmp_path / "model", DIGITS + ASK, hidden=32)
    start, settings = Start(tmp_path / "model", 0.0), SETTINGS | CASES[case]
    mine = ours(start, tmp_path / "ours", settings)
    other = theirs(start, tmp_path / "theirs", settings, mine.samples)
    assert mine.rewards == pytest.approx(other.rewards, abs=1e-6)
    assert mine.losses == pytest.approx(other.losses, abs=1e-5)
    assert mine.norms == pytest.approx(other.norms, rel=1e-4)
    assert mine.apart(other) < 1e-4
