"""Calls of the user's code for a group, rewards and environments: each is a child item of the executor `map`.

A retried group finds the children of the attempt before it, which may have asked something else if samples cannot be
drawn again to the last bit. A child is therefore identified by its place alone, and has a tag for what was asked, which
is returned with the result. A child with another tag belongs to another attempt, and the next place is tried. A failed
child has no tag, but an attempt ends with it. So n attempts that failed or were lost leave at most n failed children,
and as many are skipped. A stolen attempt does not count: what failed then failed for the same prompt.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from blake3 import blake3
from rollout.model.errors import AttemptError, InvalidResultError
from rollout.model.item import ItemSpec, NewItem, Outcome
from rollout.workloads.json_form import field_in, object_in, parse_result
from rollout.workloads.map.failure import from_text
from rollout.workloads.map.limits import BACKSTOP_S
from rollout.workloads.train.rollouts import Group, GroupResult, Play, Scoring, scores_of

from rollout_worker.executors.port import Attempt, Child, Context

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
        self._item = attempt.id
        self._context = context
        self._next = first
        self._foreign_failures = attempt.failures + attempt.losses
        self._results: AsyncIterator[Child] | None = None
        timeout_ms = round((seconds + BACKSTOP_S) * 1000)
        self._spec = ItemSpec(executor=EXECUTOR, timeout_ms=timeout_ms, max_attempts=_ATTEMPTS)

    async def call(self, row: Scoring | Play) -> Any:
        """Return the result. Raises CodeFault if there is none."""
        tag = blake3(row.encode()).hexdigest()[:32]
        payload = replace(row, tag=tag).encode()
        while True:
            child = await self._child(payload)
            if child.outcome is not Outcome.DONE:
                if child.outcome is Outcome.FAILED and self._foreign_failures:
                    self._foreign_failures -= 1
                    continue
                failure = child.failure
                raise CodeFault(*((failure.code, failure.message) if failure else (child.outcome.name.lower(), "")))
            try:
                found = object_in(parse_result(child.data), "it")
                if field_in(found, "tag", str) == tag:
                    return found.get("value")
            except InvalidResultError as error:
                raise CodeFault("reward_invalid", error.message) from error

    async def _child(self, payload: bytes) -> Child:
        place, self._next = self._next, self._next + 1
        identity = blake3(b"\x02code" + self._item + place.to_bytes(8, "big")).digest()
        await self._context.spawn([NewItem(identity, payload, self._spec)], first_ordinal=place, seal=False)
        if self._results is None:
            self._results = self._context.children(place)
        try:
            return await anext(self._results)
        except StopAsyncIteration:
            raise CodeFault("cancelled", "the group was closed while it waited for its reward") from None


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
