"""Rewards that are code: a child of the group's item, of the executor `map`, scores its samples; and before the first
step, one of the first item loads the functions."""

from __future__ import annotations

from dataclasses import replace

from blake3 import blake3
from rollout.model.errors import AttemptError, InvalidResultError
from rollout.model.item import ItemSpec, NewItem, Outcome
from rollout.workloads.json_form import parse_result
from rollout.workloads.map.failure import from_text
from rollout.workloads.map.limits import BACKSTOP_S
from rollout.workloads.train.rollouts import Group, GroupResult, Scoring, scores_of

from rollout_worker.executors.port import Attempt, Child, Context

EXECUTOR = "map"
_LOAD_S = 300.0
_ATTEMPTS = 3
"""A function says of an error whether another try may help."""


async def load_functions(functions: list[str], attempt: Attempt, context: Context) -> None:
    """AttemptError (`invalid_data`, not retryable) with what keeps them from being imported on a worker."""
    if not functions:
        return
    row = Scoring(functions, load_only=True).encode()
    spec = ItemSpec(executor=EXECUTOR, timeout_ms=round((_LOAD_S + BACKSTOP_S) * 1000), max_attempts=_ATTEMPTS)
    await context.spawn([NewItem(blake3(b"\x01loading" + attempt.id + row).digest(), row, spec)])
    async for child in context.children():
        if child.outcome is not Outcome.DONE:
            failure = child.failure
            why = from_text(failure.code, failure.message).message if failure else child.outcome.name.lower()
            raise AttemptError(why, code="invalid_data", retry=False)


async def score(group: Group, result: GroupResult, attempt: Attempt, context: Context) -> None:
    """Put rewards, or what kept them from being found, into `result`."""
    if group.scoring is None:
        return
    row = replace(
        group.scoring,
        completions=[sample.text for sample in result.samples],
        completion_ids=[sample.ids for sample in result.samples],
        step=group.step,
    ).encode()
    spec = ItemSpec(executor=EXECUTOR, timeout_ms=round((group.scoring_s + BACKSTOP_S) * 1000), max_attempts=_ATTEMPTS)
    identity = blake3(b"\x01scoring" + attempt.id + row).digest()
    await context.spawn([NewItem(identity, row, spec)])
    async for child in context.children():
        functions = len(group.scoring.functions)
        try:
            result.rewards = _rewards(child, functions, len(result.samples))
        except InvalidResultError as error:
            result.fault = {"code": "reward_invalid", "message": error.message}
        else:
            if child.outcome is not Outcome.DONE:
                failure = child.failure
                code, text = (failure.code, failure.message) if failure else (child.outcome.name.lower(), "")
                found = from_text(code, text)
                result.fault = {"code": code, "message": found.message, "traceback": found.traceback}


def _rewards(child: Child, functions: int, samples: int) -> list[list[float | None]]:
    if child.outcome is not Outcome.DONE:
        return []
    return scores_of(parse_result(child.data), functions, samples)
