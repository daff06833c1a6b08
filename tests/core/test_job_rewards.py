"""Rewards as verifiers leave them, those of several steps, and what follows from an error."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from rollout.config.cloud import CloudSection
from rollout.workloads.job.config import JobConfig
from rollout.workloads.job.dialect import DIALECTS, HARBOR, ROLLOUT, Dialect
from rollout.workloads.job.engine import EngineSection
from rollout.workloads.job.errors import ERRORS, HARBOR_NAMES, PolicyOverride, is_infrastructure, policy_of, types_of
from rollout.workloads.job.rewards import BYTES_MAX, RewardError, combine, misses, read_rewards, single
from rollout.workloads.job.task_toml import TaskToml

DOCS = Path(__file__).parents[2] / "docs" / "job.md"
BOTH = [ROLLOUT, HARBOR]


def refused(json_file: bytes | None, text_file: bytes | None, dialect: Dialect = HARBOR) -> tuple[str, str]:
    with pytest.raises(RewardError) as caught:
        read_rewards(json_file, text_file, dialect)
    return caught.value.type, caught.value.message


# ---- reward.txt


@pytest.mark.parametrize("dialect", BOTH)
@pytest.mark.parametrize(
    ("text", "reward"),
    [(b"1", 1), (b" 0.5\n", 0.5), (b"-3", -3), (b"+1e3", 1000), (b"1e300", 1e300), (b".5", 0.5), (b"\xef\xbb\xbf1", 1)],
)
def test_a_number_in_reward_txt(dialect: Dialect, text: bytes, reward: float) -> None:
    assert read_rewards(None, text, dialect) == {"reward": reward}


@pytest.mark.parametrize(
    "text",
    [b"", b" \n", b"nan", b"inf", b"-Infinity", b"1e999", b"one", b"1_0", b"0x1", b"1 2", b"true", b"1,5", b"\xff"],
)
def test_what_reward_txt_must_not_hold(text: bytes) -> None:
    assert refused(None, text)[0] == "verifier_reward_invalid"


def test_a_reward_file_without_end() -> None:
    assert refused(None, b"1" * (BYTES_MAX + 1)) == ("verifier_reward_invalid", "reward.txt is larger than 1 MiB")


# ---- reward.json


@pytest.mark.parametrize("dialect", BOTH)
@pytest.mark.parametrize(("raw", "reward"), [(b"1", 1), (b'{"reward": 0.5}', 0.5), (b"-2.5e3", -2500)])
def test_one_reward_in_reward_json(dialect: Dialect, raw: bytes, reward: float) -> None:
    assert read_rewards(raw, None, dialect) == {"reward": reward}


def test_several_rewards_are_harbors() -> None:
    raw = b'{"correct": 1, "fast": 0.25}'
    assert read_rewards(raw, None, HARBOR) == {"correct": 1, "fast": 0.25}
    kind, message = refused(raw, None, ROLLOUT)
    assert kind == "verifier_reward_invalid"
    assert "not the rewards correct, fast" in message


def test_true_is_one_for_harbor_and_nothing_for_the_older_format() -> None:
    assert read_rewards(b'{"reward": true}', None, HARBOR) == {"reward": 1.0}
    assert refused(b'{"reward": true}', None, ROLLOUT)[0] == "verifier_reward_invalid"


@pytest.mark.parametrize("dialect", BOTH)
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b'"1"',
        b"NaN",
        b"Infinity",
        b"1e999",
        b"1" * 400,
        b'{"reward": "1"}',
        b'{"reward": null}',
        b'{"reward": NaN}',
        b'{"reward": {"a": 1}}',
        b'{"reward": 1',
        b"[" * 5000,
        b"{%s}" % b",".join(b'"r%d": 1' % n for n in range(1001)),
        b"\xff",
    ],
)
def test_what_reward_json_must_not_hold(dialect: Dialect, raw: bytes) -> None:
    assert refused(raw, None, dialect)[0] == "verifier_reward_invalid"


def test_reward_json_comes_before_reward_txt() -> None:
    assert read_rewards(b"0", b"1", HARBOR) == {"reward": 0}


def test_a_broken_reward_json_is_not_made_good_by_reward_txt() -> None:
    assert refused(b"oops", b"1")[0] == "verifier_reward_invalid"


def test_no_reward_file() -> None:
    assert refused(None, None) == ("verifier_reward_missing", "the verifier left neither reward.json nor reward.txt")


# ---- steps


def test_the_mean_of_steps_takes_missing_names_for_0_and_leaves_out_steps_without_rewards() -> None:
    steps = [{"a": 1.0, "b": 1.0}, None, {"a": 0.5}]
    assert combine(steps, "mean") == {"a": 0.75, "b": 0.5}


def test_the_final_step_decides_alone() -> None:
    assert combine([{"a": 1.0}, {"b": 0.5}], "final") == {"b": 0.5}
    assert combine([{"a": 1.0}, None], "final") is None


@pytest.mark.parametrize("strategy", ["mean", "final"])
def test_a_trial_without_any_rewards_has_none(strategy: str) -> None:
    assert combine([None], strategy) is None  # pyright: ignore[reportArgumentType]


def test_the_mean_of_huge_rewards_does_not_overflow() -> None:
    assert combine([{"r": 1.5e308}, {"r": 1.5e308}], "mean") == {"r": 1.5e308}


@pytest.mark.parametrize(
    ("rewards", "minimum", "why"),
    [
        ({"reward": 0.5}, {"reward": 0.5}, None),
        ({"reward": 0.4}, {"reward": 0.5}, "reward is 0.4, and must be at least 0.5"),
        ({"a": 1.0}, {"a": 1.0, "b": 0.0}, "b is missing, and must be at least 0"),
        (None, {"reward": -1.0}, "reward is missing, and must be at least -1"),
        (None, {}, None),
    ],
)
def test_a_step_that_misses_its_minimum(
    rewards: dict[str, float] | None, minimum: dict[str, float], why: str | None
) -> None:
    assert misses(rewards, minimum) == why


@pytest.mark.parametrize(
    ("rewards", "one"),
    [(None, None), ({}, None), ({"a": 0.5}, 0.5), ({"reward": 1.0, "x": 0.0}, 1.0), ({"a": 1.0, "b": 0.0}, 0.5)],
)
def test_the_one_number_of_a_trial(rewards: dict[str, float] | None, one: float | None) -> None:
    assert single(rewards) == one


# ---- errors


OLDER_TYPES = [
    "environment_build_failed",
    "environment_build_timeout",
    "environment_image_pull_failed",
    "environment_start_failed",
    "environment_resource_allocation_failed",
    "agent_install_failed",
    "agent_install_timeout",
    "agent_execution_failed",
    "agent_execution_timeout",
    "verifier_failed",
    "verifier_timeout",
    "verifier_reward_missing",
    "verifier_reward_invalid",
    "environment_teardown_failed",
    "task_invalid",
    "task_not_found",
    "internal_error",
]


def test_the_table_has_every_type_of_the_format() -> None:
    assert set(OLDER_TYPES) <= set(ERRORS)


def test_every_type_of_harbor_is_one_of_the_table() -> None:
    assert all(set(types) <= set(ERRORS) for types in HARBOR_NAMES.values())
    assert types_of("AgentTimeoutError") == ("agent_execution_timeout",)


def test_an_unknown_error_is_infrastructure_and_never_a_score() -> None:
    policy = policy_of("something_new")
    assert is_infrastructure(policy)
    assert (policy.retried, policy.graded, policy.valid_reward) == (True, False, False)


@pytest.mark.parametrize(
    ("type", "retried", "graded", "valid"),
    [
        ("environment_start_failed", True, False, False),
        ("api_rate_limited", True, True, False),
        ("verifier_timeout", False, True, True),
        ("environment_out_of_memory", False, True, True),
        ("environment_lost", True, False, False),
        ("agent_authentication_failed", False, False, False),
        ("agent_execution_timeout", False, True, True),
        ("environment_teardown_failed", False, True, True),
    ],
)
def test_what_follows_from_an_error(type: str, retried: bool, graded: bool, valid: bool) -> None:
    policy = policy_of(type)
    assert (policy.retried, policy.graded, policy.valid_reward) == (retried, graded, valid)


def test_infrastructure_never_scores() -> None:
    for name, policy in ERRORS.items():
        assert not (policy.valid_reward and is_infrastructure(policy)) or name == "environment_teardown_failed"


def test_a_job_may_override_a_row() -> None:
    policy = policy_of("agent_execution_timeout", {"agent_execution_timeout": PolicyOverride(has_valid_reward=False)})
    assert (policy.retried, policy.graded, policy.valid_reward) == (False, True, False)
    assert policy_of("new_one", {"new_one": PolicyOverride(should_retry=False)}).retried is False


# ---- the tables of the docs


def rows(heading: str) -> dict[str, list[str]]:
    """First cell to the others of the table below `heading`."""
    section = DOCS.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = [line.split(" | ") for line in section.splitlines() if "|" in line]
    return {row[0].strip().strip("`"): [cell.strip() for cell in row[1:]] for row in cells[2:]}


def test_the_docs_have_the_table_of_errors() -> None:
    yes = {True: "yes", False: "no"}
    expected = {
        name: [one.phase, one.blame, yes[one.retried], yes[one.graded], yes[one.valid_reward]]
        for name, one in ERRORS.items()
    }
    documented = rows("What follows from an error")
    assert {name: cells for names, cells in documented.items() for name in re.findall(r"\w+", names)} == expected


def test_the_docs_have_the_table_of_the_two_formats() -> None:
    table = rows("Where the two formats differ")
    shown = {None: "none", True: "yes", False: "no"}

    def cell(value: object) -> str:
        if isinstance(value, bool) or value is None:
            return shown[value]
        return f"{value:g}" if isinstance(value, float) else str(value)

    for key in Dialect.__dataclass_fields__:
        if key != "name":
            assert table[key][:2] == [cell(getattr(one, key)) for one in DIALECTS.values()], key


def keys_of(model: type[BaseModel]) -> set[str]:
    """Of `model` and of every section in it."""
    found = set(model.model_fields)
    for field in model.model_fields.values():
        for inner in sections_in(field.annotation):
            found |= keys_of(inner) if inner not in ELSEWHERE else set()
    return found


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [inner for part in get_args(annotation) for inner in sections_in(part)]


ELSEWHERE = (EngineSection, CloudSection)
"""As of a batch: docs/configuration.md."""
OF_OTHERS = {"memory", "email", "transport", "url", "command", "args", "headers", "topology"}
"""Old names, and keys of what providers and agents read, which their own pages describe."""


@pytest.mark.parametrize("model", [JobConfig, TaskToml])
def test_the_docs_name_every_key(model: type[BaseModel]) -> None:
    text = DOCS.read_text()
    assert sorted(key for key in keys_of(model) - OF_OTHERS if not re.search(rf"\b{key}\b", text)) == []


def test_the_numbers_of_a_reward_are_finite_everywhere() -> None:
    assert math.isfinite(read_rewards(b"1e308", None, HARBOR)["reward"])
