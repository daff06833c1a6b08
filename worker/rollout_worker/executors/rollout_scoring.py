"""The user's code that a group needs, rewards and environments: a call is a child of the group's item
(`tagged_children`), of the executor `map`. Where samples cannot be drawn again to the last bit, the try before this one
may have asked something else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blake3 import blake3
from rollout.model.errors import AttemptError, InvalidResultError
from rollout.model.item import ItemSpec
from rollout.workloads.json_form import field_in, object_in, parse_result
from rollout.workloads.map.failure import from_text
from rollout.workloads.map.limits import BACKSTOP_S
from rollout.workloads.train.rollouts import Group, GroupResult, Play, Scoring, scores_of

from rollout_worker.executors.port import Attempt, Context
from rollout_worker.tagged_children import NoAnswerError, TaggedChildren

EXECUTOR = "map"
_LOAD_S = 300.0
_ATTEMPTS = 3
"""Attempts of a child; a function's error says whether a retry may help."""


class CodeFault(Exception):
    """The user's code failed, or could not be run."""

    def __init__(self, code: str, message: str) -> None:
        told = from_text(code, message)
        super().__init__(told.message)
        self.fault = {"code": code, "message": told.message, "traceback": told.traceback}


class Code:
    """Code for one attempt at a group. `seconds` limits a call; `first` is the ordinal of its first. One call at a
    time."""

    def __init__(self, attempt: Attempt, context: Context, seconds: float, *, first: int = 0) -> None:
        timeout_ms = round((seconds + BACKSTOP_S) * 1000)
        spec = ItemSpec(executor=EXECUTOR, timeout_ms=timeout_ms, max_attempts=_ATTEMPTS)
        foreign_failures = attempt.failures + attempt.losses
        self._children = TaggedChildren(
            b"\x02code", attempt.id, context, spec, foreign_failures=foreign_failures, first=first
        )

    async def call(self, row: Scoring | Play) -> Any:
        """Return the result. Raises CodeFault if there is none."""
        tag = blake3(row.encode()).hexdigest()[:32]
        payload = replace(row, tag=tag).encode()
        try:
            return await self._children.answer(tag, lambda place: payload, _tagged)
        except NoAnswerError as error:
            raise CodeFault(error.code, error.message) from error
        except InvalidResultError as error:
            raise CodeFault("reward_invalid", error.message) from error


def _tagged(data: bytes) -> tuple[str, Any]:
    found = object_in(parse_result(data), "it")
    return field_in(found, "tag", str), found.get("value")


async def load_code(functions: list[str], environment: str, attempt: Attempt, context: Context) -> None:
    """Check that a worker can import the functions and the environment (empty for none).

    Raises AttemptError (`invalid_data`, not retryable) with the cause.
    """
    code = Code(attempt, context, _LOAD_S)
    try:
        if functions:
            await code.call(Scoring(functions, load_only=True))
        if environment:
            await code.call(Play(environment, None, {}, [], [], 0, [], []))
    except CodeFault as fault:
        raise AttemptError(str(fault), code="invalid_data", retry=False) from fault


async def score(group: Group, result: GroupResult, code: Code, completions: list[Any] | None = None) -> None:
    """Add rewards to `result`, or why there are none. `completions` replaces the samples' text."""
    if group.scoring is None or not group.scoring.functions:
        return
    row = replace(
        group.scoring,
        completions=completions or [sample.text for sample in result.samples],
        completion_ids=[sample.ids for sample in result.samples],
        step=group.step,
    )
    try:
        result.rewards = scores_of(await code.call(row), len(row.functions), len(result.samples))
    except InvalidResultError as error:
        result.fault = {"code": "reward_invalid", "message": error.message}
    except CodeFault as fault:
        result.fault = fault.fault
