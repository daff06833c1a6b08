"""The user's code that a group needs, rewards and environments: a call is a child of the group's item, of the executor
`map`.

A try at a group finds there what the try before it asked, and where samples cannot be drawn again to the last bit, that
may have been something else. So a child has an id by its place alone, and a tag by what was asked, which comes back
with the result. One with another tag was another try's: the next place is asked. A child that failed has no tag. A try
ends with it, so among the places of n tries that failed or were lost there are at most n such, and as many are passed
over. One that was stolen counts for none: what failed then failed for the same prompt.
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
"""A function says of an error whether another try may help."""


class CodeFault(Exception):
    """What the user's code did wrong, or what kept it from being run."""

    def __init__(self, code: str, message: str) -> None:
        told = from_text(code, message)
        super().__init__(told.message)
        self.fault = {"code": code, "message": told.message, "traceback": told.traceback}


class Code:
    """Of one try at a group. `seconds`: that a call may take; `first`: the ordinal of its first. One call at a time."""

    def __init__(self, attempt: Attempt, context: Context, seconds: float, *, first: int = 0) -> None:
        self._item = attempt.id
        self._context = context
        self._next = first
        self._foreign_failures = attempt.failures + attempt.losses
        self._results: AsyncIterator[Child] | None = None
        timeout_ms = round((seconds + BACKSTOP_S) * 1000)
        self._spec = ItemSpec(executor=EXECUTOR, timeout_ms=timeout_ms, max_attempts=_ATTEMPTS)

    async def call(self, row: Scoring | Play) -> Any:
        """The result. CodeFault: there is none."""
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
    """AttemptError (`invalid_data`, not retryable) with what keeps them from being imported on a worker. `environment`:
    empty: there is none."""
    code = Code(attempt, context, _LOAD_S)
    try:
        if functions:
            await code.call(Scoring(functions, load_only=True))
        if environment:
            await code.call(Play(environment, None, {}, [], [], 0, [], []))
    except CodeFault as fault:
        raise AttemptError(str(fault), code="invalid_data", retry=False) from fault


async def score(group: Group, result: GroupResult, code: Code, completions: list[Any] | None = None) -> None:
    """Put rewards, or what kept them from being found, into `result`. `completions`: other than the samples' text."""
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
