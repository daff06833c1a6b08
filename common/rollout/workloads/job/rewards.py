"""Reads what a verifier leaves: the rewards of a step, and from those of all steps the reward of the trial."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn, cast

from rollout.workloads.job.averages import mean
from rollout.workloads.job.dialect import HARBOR, Dialect
from rollout.workloads.json_form import parse_json

REWARD_JSON = "reward.json"
REWARD_TEXT = "reward.txt"
BYTES_MAX = 1 << 20
"""Maximum bytes of a reward file; one byte more is read, to notice a larger file."""
REWARD = "reward"
"""The default name of a reward."""
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_NAMES_MAX = 1000
Rewards = dict[str, float]


class RewardError(Exception):
    """The reward files cannot be used. `type` is one of `errors.ERRORS`. `what` is the fault of the content, empty if
    there is no file."""

    def __init__(self, type: str, message: str, what: str = "") -> None:
        super().__init__(message)
        self.type = type
        self.message = message
        self.what = what


def read_rewards(json_file: bytes | None, text_file: bytes | None, dialect: Dialect) -> Rewards:
    """Return the rewards in `reward.json`, or in `reward.txt` if there is no reward.json. A missing file is None.

    Every reward is a finite number, of any size and sign. Raises RewardError for no file, or one with anything else. A
    reward.txt does not replace a wrong reward.json, because either may have been planted.
    """
    if json_file is not None:
        return _from_json(json_file, dialect)
    if text_file is not None:
        return {REWARD: _from_text(text_file)}
    raise RewardError("verifier_reward_missing", f"the verifier left neither {REWARD_JSON} nor {REWARD_TEXT}")


def read_grade(raw: bytes | None) -> Rewards:
    """Return the grade of an experiment's grader: an object of finite numbers with unique names. Raises RewardError."""
    if raw is None:
        raise RewardError("verifier_reward_missing", "the grader left no grade")
    try:
        value: Any = parse_json(_text(raw, REWARD_JSON).encode())
    except ValueError as error:
        _invalid(REWARD_JSON, str(error))
    if not isinstance(value, dict):
        _invalid(REWARD_JSON, f'must hold an object with "score", such as {{"score": 1}}, not {json.dumps(value)[:40]}')
    grade = cast("dict[str, Any]", value)
    if len(grade) > _NAMES_MAX or "" in grade:
        _invalid(REWARD_JSON, f"must hold at most {_NAMES_MAX} metrics, each with a name")
    return {name: _number(one, HARBOR, name) for name, one in grade.items()}


def _invalid(file: str, what: str) -> NoReturn:
    raise RewardError("verifier_reward_invalid", f"{file} {what}", what)


def _text(raw: bytes, file: str) -> str:
    if len(raw) > BYTES_MAX:
        _invalid(file, f"is larger than {BYTES_MAX >> 20} MiB")
    try:
        text = raw.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        _invalid(file, "is not UTF-8 text")
    if not text:
        _invalid(file, "is empty")
    return text


def _from_text(raw: bytes) -> float:
    text = _text(raw, REWARD_TEXT)
    if not _NUMBER.fullmatch(text):
        _invalid(REWARD_TEXT, f"must hold a number, not {text[:40]!r}")
    return _finite(float(text), text, REWARD_TEXT)


def _finite(value: float, shown: object, file: str) -> float:
    if not math.isfinite(value):
        _invalid(file, f"must hold a finite number, not {str(shown)[:40]}")
    return value


def _from_json(raw: bytes, dialect: Dialect) -> Rewards:
    try:
        value: Any = json.loads(_text(raw, REWARD_JSON))
    except RecursionError:
        _invalid(REWARD_JSON, "is nested too deeply")
    except ValueError as error:
        _invalid(REWARD_JSON, f"is not valid JSON: {error}")
    if not isinstance(value, dict):
        return {REWARD: _number(value, dialect)}
    rewards = cast("dict[str, Any]", value)
    if not rewards or len(rewards) > _NAMES_MAX:
        _invalid(REWARD_JSON, f"must hold 1 to {_NAMES_MAX} rewards, not {len(rewards)}")
    if not dialect.several_rewards and list(rewards) != [REWARD]:
        named = ", ".join(list(rewards)[:5])[:100]
        _invalid(
            REWARD_JSON,
            f'must hold one number or {{"reward": number}}, not the rewards {named}: several need schema_version 1.1 '
            "or later in task.toml",
        )
    return {name: _number(reward, dialect, name) for name, reward in rewards.items()}


def _number(value: Any, dialect: Dialect, name: str = REWARD) -> float:
    if isinstance(value, bool) and dialect.truth_is_number:
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        _invalid(REWARD_JSON, f"must hold a number for {name[:40]!r}, not {json.dumps(value)[:40]}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    return _finite(number, "a number beyond 1.8e308" if math.isinf(number) else value, REWARD_JSON)


def misses(rewards: Mapping[str, float] | None, minimum: Mapping[str, float]) -> str | None:
    """Return why a step with these rewards ends the trial, or None. A missing reward misses any minimum; `rewards` is
    None if the verifier failed."""
    for name, threshold in minimum.items():
        value = (rewards or {}).get(name)
        if value is None:
            return f"{name} is missing, and must be at least {threshold:g}"
        if value < threshold:
            return f"{name} is {value:g}, and must be at least {threshold:g}"
    return None


def combine(steps: Sequence[Mapping[str, float] | None], strategy: Literal["mean", "final"]) -> Rewards | None:
    """Combine the rewards of the steps, in order, to those of the trial; None if the verifier failed or did not run.

    mean: of each name over the steps that have rewards, where a missing name counts as 0. final: those of the last step
    that began. A trial of one step has that step's.
    """
    if strategy == "final":
        return dict(steps[-1]) if steps and steps[-1] is not None else None
    present = [step for step in steps if step is not None]
    if not present:
        return None
    names = dict.fromkeys(name for step in present for name in step)
    return {name: mean([step.get(name, 0.0) for step in present]) for name in names}


def single(rewards: Mapping[str, float] | None) -> float | None:
    """Return the single number of a trial's result: the reward called "reward", else the only one, else the mean of
    all.

    Returns None if there are none.
    """
    if not rewards:
        return None
    if REWARD in rewards:
        return rewards[REWARD]
    return mean(list(rewards.values()))
