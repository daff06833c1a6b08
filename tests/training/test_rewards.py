"""Rewards that are code: called in TRL's shape, and every wrong answer said with function and completion."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from rollout.model.errors import AttemptError
from rollout.model.item import Failure, NewItem, Outcome
from rollout.workloads.json_form import JsonObject, canonical, parse_json
from rollout.workloads.map.failure import to_text
from rollout.workloads.train.rollouts import Scoring, scores_of
from rollout_worker import rewards
from rollout_worker.executors.port import Attempt, Child, Context
from rollout_worker.executors.rollout_scoring import load_code
from rollout_worker.rewards import RewardError

CODE = """
import asyncio, math
SEEN = []

def length(prompts, completions, completion_ids, answer, **columns):
    SEEN.append((prompts, completions, completion_ids, answer, columns))
    return [len(one) for one in completion_ids]

class Chat:
    made = 0
    def __init__(self):
        Chat.made += 1
    def __call__(self, completions, **columns):
        return [one[0]["content"] == "a" for one in completions]

async def later(completions, **columns):
    await asyncio.sleep(0)
    return [None for _ in completions]

async def late_error(**columns):
    raise OSError("no judge")

def greedy(prompts, completions, completion_ids, **columns):
    completion_ids[0].clear()
    return [0.0 for _ in completions]

def few(**columns): return [1.0]
def text(**columns): return "ab"
def none(**columns): return None
def word(completions, **columns): return [1.0, "good"]
def nan(completions, **columns): return [math.inf, 1.0]
def not_a_number(completions, **columns): return [1.0, math.nan]
def raises(**columns): raise ZeroDivisionError("of what")
NUMBER = 3
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:  # pyright: ignore[reportUnusedFunction]
    (tmp_path / "judges.py").write_text(CODE)
    (tmp_path / "broken.py").write_text("import nowhere_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))  # pyright: ignore[reportUnknownMemberType]
    monkeypatch.setattr(rewards, "_loaded", {})
    yield
    sys.modules.pop("judges", None)


def score(*functions: str, prompt: Any = "p", texts: tuple[str, ...] = ("a", "b"), load_only: bool = False) -> Any:
    ids = [list(range(3 + place)) for place in range(len(texts))]
    row = Scoring(list(functions), prompt, list(texts), ids, {"answer": "x", "level": None}, load_only=load_only)
    found = rewards.score(parse_json(row.encode()))
    return asyncio.run(_whole(found)) if isinstance(found, Awaitable) else found


async def _whole(found: Awaitable[Any]) -> Any:
    return await found


def test_plain_and_conversational_prompts() -> None:
    assert score("judges:length") == [[3.0, 4.0]]
    prompt = [{"role": "user", "content": "q"}]
    assert score("judges:length", "judges:Chat", "judges:Chat", prompt=prompt) == [[3.0, 4.0], [1.0, 0.0], [1.0, 0.0]]
    plain, chat = sys.modules["judges"].SEEN
    assert plain == (["p", "p"], ["a", "b"], [[0, 1, 2], [0, 1, 2, 3]], ["x", "x"], {"level": [None, None]})
    assert chat[0] == [prompt, prompt] and chat[1][1] == [{"role": "assistant", "content": "b"}]
    assert sys.modules["judges"].Chat.made == 1


def test_a_function_changes_nothing_that_the_next_one_is_given() -> None:
    assert score("judges:greedy", "judges:length") == [[0.0, 0.0], [3.0, 4.0]]


def test_asynchronous_ones_beside_others() -> None:
    found = score("judges:later", "judges:length")
    assert found == [[None, None], [3.0, 4.0]] == scores_of(parse_json(canonical(found)), 2, 2)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("function", "message", "retry"),
    [
        ("few", "judges:few returned 1 values for 2 completions", False),
        ("text", "judges:text returned str 'ab', and not a list", False),
        ("none", "judges:none returned NoneType None, and not a list", False),
        ("word", "judges:word, completion 2: str 'good' is no number", False),
        ("nan", "judges:nan, completion 1: inf is no reward", False),
        ("not_a_number", "judges:not_a_number, completion 2: nan is no reward", False),
        ("raises", "judges:raises raised ZeroDivisionError: judges.py:.*: of what", True),
        ("late_error", "judges:late_error raised OSError: judges.py:.*: no judge", True),
        ("absent", "judges:absent cannot be loaded: AttributeError", False),
        ("NUMBER", "judges:NUMBER is a int, which cannot be called", False),
    ],
)
def test_what_is_no_reward(function: str, message: str, retry: bool) -> None:
    with pytest.raises(RewardError, match=message) as error:
        score("judges:later", f"judges:{function}")
    assert error.value.retry is retry


def test_numbers_of_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    score("judges:few", load_only=True)
    monkeypatch.setitem(rewards._loaded, "judges:few", lambda **_: np.array([1, 2], np.float32))  # pyright: ignore[reportPrivateUsage]
    assert score("judges:few") == [[1.0, 2.0]]


def test_functions_are_only_loaded() -> None:
    assert score("judges:raises", load_only=True) == []
    with pytest.raises(RewardError, match=r"broken:f cannot be loaded: broken\.py:1: ModuleNotFoundError: "):
        score("broken:f", load_only=True)


class Children:
    """A context, with what came of every child."""

    def __init__(self, failure: Failure | None) -> None:
        self.failure = failure
        self.spawned: list[JsonObject] = []

    async def spawn(self, items: Sequence[NewItem], *, first_ordinal: int = 0, seal: bool = True, **_: Any) -> None:
        assert len(self.spawned) == first_ordinal and all(item.spec.executor == "map" for item in items)
        self.spawned += [parse_json(cast(bytes, item.payload)) for item in items]

    async def children(self, from_child: int = 0, *, holds_slot: bool = False) -> AsyncIterator[Child]:
        for ordinal in (from_child, from_child + 1):
            data = canonical({"tag": self.spawned[ordinal]["tag"], "value": []})
            outcome = Outcome.FAILED if self.failure else Outcome.DONE
            yield Child(ordinal, outcome, data, self.failure)


def loaded(functions: list[str], environment: str = "", failure: Failure | None = None) -> list[JsonObject]:
    context, attempt = Children(failure), cast(Attempt, SimpleNamespace(id=b"prepare", attempt=1, failures=0, losses=0))
    asyncio.run(load_code(functions, environment, attempt, cast(Context, context)))
    return context.spawned


def test_functions_are_loaded_by_a_child_before_the_first_step() -> None:
    rows = loaded(["judges:f"], "games:Env")
    assert rows[0]["load_only"] is True and rows[1]["environment"] == "games:Env" and rows[1]["histories"] == []
    assert loaded([]) == []
    failure = Failure(
        "exception", to_text("rollout_worker.rewards.RewardError", "reward a:f cannot be loaded: why", "at")
    )
    with pytest.raises(AttemptError) as error:
        loaded(["a:f"], failure=failure)
    assert (error.value.message, error.value.error_code) == ("reward a:f cannot be loaded: why", "invalid_data")


def test_a_failure_is_passed_over_only_where_a_try_failed_or_was_lost() -> None:
    """What was stolen or given back left no failure behind that is not of this try."""
    for tries in (0, 1):
        context = Children(Failure("exception", "why"))
        attempt = cast(Attempt, SimpleNamespace(id=b"group", attempt=4, failures=tries, losses=0))
        with pytest.raises(AttemptError):
            asyncio.run(load_code(["a:f"], "", attempt, cast(Context, context)))
        assert len(context.spawned) == 1 + tries
