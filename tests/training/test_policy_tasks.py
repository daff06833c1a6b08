"""The task that policies learn in tests: what its start is worth, and its rewards."""

from __future__ import annotations

import pytest
from policy_rewards import digits, exact
from policy_tasks import LEVELS, Start, exact_match_of, held_out, problems

pytestmark = pytest.mark.engine


def test_the_supervised_model_is_right_about_half_of_the_time(supervised_policy: Start) -> None:
    assert LEVELS[0] <= supervised_policy.level <= LEVELS[1]
    assert exact_match_of(supervised_policy.model, problems(500, held=True)) == supervised_policy.level


def test_no_prompt_that_is_held_out_is_trained_on() -> None:
    assert not any(held_out(row["prompt"][:-1]) for row in problems(200))


def test_rewards_are_of_the_whole_answer_and_of_its_places() -> None:
    said, right = ["1247", "1274", "124", "12477", ""], ["1247"] * 5
    assert exact(said, said, right) == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert digits(said, said, right) == [1.0, 0.5, 0.75, 0.8, 0.0]
