"""Warnings about a run of reinforcement learning while it proceeds: signs that it learns nothing, or the wrong
thing."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from rollout.workloads.json_form import JsonObject

WINDOW = 100
"""Number of steps to look at, the latest ones."""
_TAIL = 5
"""Number of steps to average."""
_CONSTANT = 10
_MOST, _KL, _KL_GROWTH, _ENTROPY_SHARE, _ENTROPY = 0.8, 1.0, 5.0, 0.1, 0.01
_READ = ("rewards_failed", "reward", "frac_reward_zero_std", "kl", "entropy", "completions/clipped_ratio")


class Sign(NamedTuple):
    """A warning. `code` identifies its kind."""

    code: str
    text: str


def warnings_of(metrics: Sequence[JsonObject]) -> list[Sign]:
    """Return warnings for the latest lines of metrics of a run, one per step. A line without `reward` was not trained
    on."""
    lines = [_read(line) for line in metrics if "reward" in line]
    failed = _failed(metrics[-_TAIL:])
    if len(lines) < _TAIL:
        return failed
    head, tail = lines[:_TAIL], lines[-_TAIL:]
    return [*failed, *_constant(lines), *_kl(head, tail), *_entropy(head, tail, len(lines)), *_shares(tail)]


def _failed(tail: Sequence[JsonObject]) -> list[Sign]:
    count = sum(line.get("rewards_failed", 0) for line in tail)
    if not count:
        return []
    return [
        Sign(
            "reward_failed",
            f"the reward of {count} groups failed in the last {len(tail)} steps, and on_reward_error lets the run go "
            "on: summary.json counts the causes, and samples.jsonl has what was raised, as reward_fault, of samples "
            "that got 0 for it",
        )
    ]


def _constant(lines: Sequence[JsonObject]) -> list[Sign]:
    spread = [_spread(line) for line in lines]
    if not any(spread[-_TAIL:]) and not any(line["reward"] for line in lines[-_TAIL:]):
        return [
            Sign(
                "reward_zero",
                f"every reward of the last {_TAIL} steps is 0, so nothing is learnt: look at what the policy says, "
                "`rollout train samples RUN --step N`, and at the reward functions; a task that the policy never "
                "solves needs easier prompts, a reward for parts, or supervised fine-tuning first",
            )
        ]
    rewards = [line["reward"] for line in lines[-_CONSTANT:]]
    if len(rewards) == _CONSTANT and not any(spread[-_CONSTANT:]) and max(rewards) - min(rewards) < 1e-9:
        return [
            Sign(
                "reward_constant",
                f"the reward of every sample of the last {_CONSTANT} steps is {rewards[-1]:.4g}, so nothing is learnt: "
                "the reward functions do not tell good samples from bad ones, or the task is solved",
            )
        ]
    return []


def _kl(head: Sequence[JsonObject], tail: Sequence[JsonObject]) -> list[Sign]:
    before, now = _mean(head, "kl"), _mean(tail, "kl")
    if before is None or now is None or now < _KL or (now < _KL_GROWTH * before and now < 10 * _KL):
        return []
    return [
        Sign(
            "kl_high",
            f"the KL divergence from the reference runs away: {now:.3g} a token, {before:.3g} before: lower the "
            "learning rate, or raise beta (GRPO) or kl_coef (PPO)",
        )
    ]


def _entropy(head: Sequence[JsonObject], tail: Sequence[JsonObject], steps: int) -> list[Sign]:
    before, now = _mean(head, "entropy"), _mean(tail, "entropy")
    if before is None or now is None or steps < 2 * _TAIL:
        return []
    reward_before, reward = _mean(head, "reward") or 0.0, _mean(tail, "reward") or 0.0
    # Of a policy that learns its task entropy falls too, and the reward rises.
    if now >= max(_ENTROPY_SHARE * before, _ENTROPY) or reward > reward_before + 0.02 * abs(reward_before):
        return []
    return [
        Sign(
            "entropy_low",
            f"the entropy has collapsed to {now:.3g} ({before:.3g} before) and the reward does not rise: the samples "
            "of a group are alike and the policy explores nothing: lower the learning rate, raise epsilon_high or beta",
        )
    ]


def _shares(tail: Sequence[JsonObject]) -> list[Sign]:
    found: list[Sign] = []
    zero = _mean(tail, "frac_reward_zero_std")
    if zero is not None and zero > _MOST and any(line["reward"] for line in tail):
        found.append(
            Sign(
                "zero_variance",
                f"{zero:.0%} of the groups have samples of one reward, from which nothing is learnt: choose prompts "
                "that the policy solves sometimes, a finer reward, more num_generations, or dynamic_sampling",
            )
        )
    cut = _mean(tail, "completions/clipped_ratio")
    if cut is not None and cut > 0.5:
        found.append(
            Sign(
                "cut_off",
                f"{cut:.0%} of the completions are cut off at max_completion_length: raise it, or set "
                "mask_truncated_completions = true so that they do not count",
            )
        )
    return found


def _read(line: JsonObject) -> JsonObject:
    """Return the part of a line of metrics that the warnings need."""
    found = {name: line[name] for name in _READ if name in line}
    if "objective/kl" in line:  # PPO's, of whole samples
        found["kl"] = line["objective/kl"] / max(line.get("completions/mean_length", 1.0), 1.0)
    return found | ({"spread": _spread(line)} if "reward" in line else {})


def _spread(line: JsonObject) -> float:
    """Return how much the rewards of a step's samples differ: between parts of the step if groups have one sample."""
    parts = [value for name, value in line.items() if name.startswith("rewards/") and name.endswith("/std")]
    return line.get("spread", max([line.get("reward_std", 0.0), *parts]))


def _mean(lines: Sequence[JsonObject], name: str) -> float | None:
    values = [line[name] for line in lines if name in line]
    return fmean(values) if values else None


class Watch:
    """Follows a run and warns once about each sign when it appears. `memory` is its state as JSON."""

    def __init__(self, memory: JsonObject) -> None:
        self._memory = memory

    def add(self, metrics: Sequence[JsonObject]) -> list[Sign]:
        """Add the lines of further steps, and return the signs that appeared."""
        self._memory["recent"] = [*self._memory.get("recent", []), *map(_read, metrics)][-WINDOW:]
        found, before = warnings_of(self._memory["recent"]), self._memory.get("going_on", [])
        self._memory["going_on"] = [one.code for one in found]
        return [one for one in found if one.code not in before]
