"""A policy of several turns as a user trains it: a class beside the configuration, and no reward but its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from acceptance_cli import Cli
from rollout_worker.backends.tiny import make_tiny
from transformers import AutoTokenizer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

GAME = """
class Echo:
    def reset(self, prompt, answer, **columns):
        self.answer, self.said = answer, []
        return " (in a word)"

    def step(self, completion):
        self.said.append(completion)
        return f"not {len(self.said)}", len(completion) / 10, len(self.said) == 3

    def reward(self):
        return 1.0 if self.answer in self.said else 0.0
"""
CONFIG = """
[algorithm]
kind = "grpo"
[algorithm.grpo]
base_model.uri = "model"
dataset.path = "prompts.jsonl"
num_generations = 2
prompts_per_step = 2
max_completion_length = 120
max_length = 240
stop_token_ids = {stops}
lag = 1
environment = {{ kind = "multi_turn", class = "game:Echo", max_turns = 4, weight = 2.0 }}
optimizer = {{ lr = 1e-3 }}
budget.max_steps = 2
device = "cpu"
[output]
dir = "out"
"""


def test_an_environment_is_enough(cli: Cli) -> None:
    make_tiny(cli.directory / "model")
    (cli.directory / "game.py").write_text(GAME)
    (cli.directory / "train.toml").write_text(CONFIG.format(stops=list(range(4, 512, 8))))
    rows = [{"prompt": [{"role": "user", "content": f"say {n}"}], "answer": str(n)} for n in range(4)]
    (cli.directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = cli.run("train", "grpo", "--config", "train.toml")
    assert done.code == 0, done.err
    samples = _lines(cli.directory / "out" / "samples.jsonl")
    assert [one["step"] for one in samples] == [1] * 4 + [2] * 4
    assert {one["policy_version"] for one in samples} == {0}
    tokens = AutoTokenizer.from_pretrained(cli.directory / "model")
    whole = [one for one in samples if one["finish_reason"] == "stop"]
    assert whole
    for one in whole:
        text = tokens.decode(one["completion_ids"])
        assert text.index("user\nnot 1<|im_end|>\n<|im_start|>assistant\n") < text.index("user\nnot 2<|im_end|>\n")
        assert "not 3" not in text and one["reward"] == pytest.approx(2.0 * one["rewards"]["environment"])
    metrics = _lines(cli.directory / "out" / "metrics.jsonl")
    assert all(one["rewards/environment/mean"] * 2 == pytest.approx(one["reward"]) for one in metrics)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
