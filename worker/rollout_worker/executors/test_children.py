"""Tests of a batch that run again as child items: those that failed, and those that another worker may finish first.

The ordinal alone identifies a child. A repeated attempt at the batch finds the children of the one before it, which may
be of other tests: results count, and the rest is requested again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence

from blake3 import blake3
from rollout.model.errors import InvalidResultError
from rollout.model.item import ItemSpec, NewItem
from rollout.model.item import Outcome as ItemOutcome
from rollout.workloads.json_form import canonical
from rollout.workloads.test.cases import GOOD, Batch, BatchResult, CaseResult, Outcome, Try

from rollout_worker.executors.port import Attempt, Child, Context

ASKS = 3
"""Times that retries are requested in a round, because an earlier attempt may have requested other tests."""
HEDGE_FACTOR, HEDGE_MIN_S = 2.0, 5.0
"""Multiple of the expected time, and minimum in seconds, after which a batch is a straggler."""
ELSEWHERE = "elsewhere"
"""Code of an attempt that must run on another worker."""
ELSEWHERE_MS, ELSEWHERE_TRIES = 10_000, 60
"""Interval in milliseconds, and number of times, at which another worker is sought for a duplicate."""


class Children:
    """Children of one attempt at a batch. `here` names this worker."""

    def __init__(self, batch: Batch, attempt: Attempt, context: Context, here: str) -> None:
        self._batch = batch
        self._attempt = attempt
        self._context = context
        self._here = here
        self._ordinal = 0
        self._duplicated = False  # children are read in order: behind a duplicate that runs, none can be

    async def hedge(self, running: Awaitable[None], tries: dict[str, Try]) -> None:
        """Wait for `running`, which adds to `tries`; if it takes too long, another worker runs the rest of the batch
        too.

        The first to finish counts, and the other is cancelled. The duplicate has the lowest priority: it starts when
        the run has nothing else to start.
        """
        own = asyncio.ensure_future(running)
        other: asyncio.Task[dict[str, Try]] | None = None
        try:
            done, _ = await asyncio.wait([own], timeout=max(HEDGE_MIN_S, HEDGE_FACTOR * self._batch.expected_ms / 1000))
            left = [one for one in self._batch.ids if one not in tries]
            if not done and left:
                other = asyncio.create_task(self._duplicate(left))
                await asyncio.wait([own, other], return_when=asyncio.FIRST_COMPLETED)
            if other is not None and not own.done():
                found = other.result()
                left = [one for one in left if one not in tries]
                if left and found.keys() >= set(left):
                    own.cancel()
                    await asyncio.wait([own])
                    for one, made in found.items():
                        tries.setdefault(one, made)
                    return
            await own
        finally:
            for task in (own, other):
                if task is not None and not task.done():
                    task.cancel()
                    await asyncio.wait([task])

    async def _duplicate(self, ids: Sequence[str]) -> dict[str, Try]:
        batch = self._batch.model_copy(update={"ids": tuple(ids), "retries": 0, "avoid": self._here})
        spec = ItemSpec(priority=-1, max_attempts=ELSEWHERE_TRIES, max_worker_lost=self._attempt.spec.max_worker_lost)
        first = await self._spawn([(batch, spec)])
        self._duplicated = True
        results = self._context.children(first, holds_slot=True)
        async with contextlib.aclosing(results):  # type: ignore[type-var]
            async for child in results:
                self._duplicated = False
                return {case.id: case.tries[0] for case in _cases(child)}
        return {}

    async def retry(self, cases: dict[str, list[Try]], here: Callable[[str], Awaitable[Try]]) -> None:
        """Retry each test that failed, and add the tries to its list.

        `here` runs a test in a fresh process of this worker, if an abandoned duplicate still runs; that one ends with
        the batch.
        """
        for number in range(1, self._batch.retries + 1):
            wanted = [one for one, tries in cases.items() if tries[-1].outcome not in GOOD]
            if self._duplicated:
                for one in wanted:
                    cases[one].append(await here(one))
                continue
            for _ in range(ASKS):
                if not wanted:
                    break
                for one, made in await self._ask({one: cases[one][-1].worker for one in wanted}, number):
                    if one in wanted:
                        wanted.remove(one)
                        cases[one].append(made)

    async def _ask(self, workers: Mapping[str, str], number: int) -> list[tuple[str, Try]]:
        """Request retries. `workers` maps each test to the worker where it failed last."""
        ids = list(workers)
        batch, is_last = self._batch, number == self._batch.retries
        spec = ItemSpec(max_worker_lost=self._attempt.spec.max_worker_lost)
        changes = {"attempt": batch.attempt + number, "retries": 0, "expected_ms": 0}
        retries = [
            batch.model_copy(update={**changes, "ids": (one,), "avoid": worker if is_last else ""})
            for one, worker in workers.items()
        ]
        first = await self._spawn([(one, spec) for one in retries])
        made: list[tuple[str, Try]] = []
        results = self._context.children(first)
        async with contextlib.aclosing(results):  # type: ignore[type-var]
            async for child in results:
                made.append(_made(child, ids[child.ordinal - first]))
                if len(made) == len(ids):
                    break
        return made

    async def _spawn(self, children: Sequence[tuple[Batch, ItemSpec]]) -> int:
        """Submit children and return the ordinal of the first."""
        first, self._ordinal = self._ordinal, self._ordinal + len(children)
        items = [
            NewItem(blake3(canonical([self._attempt.id.hex(), first + index])).digest(), batch.encode(), spec)
            for index, (batch, spec) in enumerate(children)
        ]
        await self._context.spawn(items, first_ordinal=first, seal=False)
        return first


def _cases(child: Child) -> Sequence[CaseResult]:
    if child.outcome is not ItemOutcome.DONE:
        return ()
    try:
        return BatchResult.parse(child.data).cases
    except InvalidResultError:
        return ()


def _made(child: Child, one: str) -> tuple[str, Try]:
    if child.outcome is ItemOutcome.DONE:
        cases = _cases(child)
        if not cases:
            return one, Try(outcome=Outcome.ERROR, message="its retry gave what is no result")
        return cases[0].id, cases[0].tries[0]
    why = f"{child.failure.code}: {child.failure.message}" if child.failure is not None else child.outcome.name.lower()
    return one, Try(outcome=Outcome.ERROR, message=f"its retry had no result: {why}")
