"""Tests of a batch that run once more as child items."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import pytest
from rollout.model.item import ItemSpec, Key, NewItem
from rollout.model.item import Outcome as ItemOutcome
from rollout.workloads.test.cases import Batch, BatchResult, CaseResult, Outcome, Try
from rollout_worker.executors import test_children
from rollout_worker.executors.port import Attempt, Child, Context, Run
from rollout_worker.executors.test_children import Children

PASSED, FAILED = Try(outcome=Outcome.PASSED), Try(outcome=Outcome.FAILED)


class Ledger:
    """Children that are there, by ordinal, and their results: all pass, on another worker, once `open` is set."""

    def __init__(self) -> None:
        self.items: list[NewItem] = []
        self.open = asyncio.Event()
        self.open.set()
        self.spawned = asyncio.Event()

    async def spawn(self, items: Sequence[NewItem], *, first_ordinal: int = 0, seal: bool = True) -> None:
        for ordinal, item in enumerate(items, first_ordinal):
            if ordinal < len(self.items):
                assert item.id == self.items[ordinal].id, "the core would end the parent"
            else:
                self.items.append(item)
        self.spawned.set()

    async def children(self, from_child: int = 0, *, holds_slot: bool = False) -> AsyncIterator[Child]:
        await self.open.wait()
        for ordinal in range(from_child, len(self.items)):
            batch = Batch.parse(cast("bytes", self.items[ordinal].payload))
            cases = tuple(CaseResult(id=one, tries=(PASSED.model_copy(update={"worker": "b"}),)) for one in batch.ids)
            yield Child(ordinal, ItemOutcome.DONE, BatchResult(cases=cases).encode(), None)


def children(ledger: Ledger, batch: Batch) -> Children:
    attempt = Attempt(Key(1, 0), 1, bytes(32), b"", ItemSpec(), Run("r", "test", {}))
    return Children(batch, attempt, cast("Context", cast("Any", ledger)), "a")


async def nowhere(one: str) -> Try:
    raise AssertionError(f"{one} is tried as a child")


async def test_an_attempt_that_is_repeated_may_retry_other_tests() -> None:
    ledger, batch = Ledger(), Batch(group="", ids=("x", "y"), retries=1)
    first = {"x": [FAILED], "y": [PASSED]}
    await children(ledger, batch).retry(first, nowhere)
    second = {"x": [PASSED], "y": [FAILED]}
    await children(ledger, batch).retry(second, nowhere)
    assert [one.outcome for one in first["x"]] == [one.outcome for one in second["y"]] == ["failed", "passed"]


@pytest.mark.parametrize("ends_first", [True, False])
async def test_the_first_to_end_a_straggler_counts(monkeypatch: pytest.MonkeyPatch, ends_first: bool) -> None:
    monkeypatch.setattr(test_children, "HEDGE_MIN_S", 0.0)
    ledger, batch = Ledger(), Batch(group="", ids=("x", "y", "z"))
    if ends_first:
        ledger.open.clear()
    tries, cancelled = {"x": FAILED}, list[bool]()

    async def own() -> None:
        try:
            await (ledger.spawned if ends_first else asyncio.Event()).wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        tries.update(y=FAILED, z=FAILED)

    await children(ledger, batch).hedge(own(), tries)
    (other,) = ledger.items
    assert Batch.parse(cast("bytes", other.payload)).ids == ("y", "z") and other.spec.priority < 0
    assert tries["x"] is FAILED and bool(cancelled) is not ends_first
    assert {tries[one].worker for one in ("y", "z")} == ({""} if ends_first else {"b"})


async def test_a_test_that_failed_does_not_wait_for_a_duplicate_that_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of children are read in order: behind the duplicate there is none before it ends."""
    monkeypatch.setattr(test_children, "HEDGE_MIN_S", 0.0)
    ledger, batch = Ledger(), Batch(group="", ids=("x",), retries=1)
    ledger.open.clear()
    tries: dict[str, Try] = {}

    async def own() -> None:
        await ledger.spawned.wait()
        tries["x"] = FAILED

    async def here(one: str) -> Try:
        return PASSED

    both = children(ledger, batch)
    await both.hedge(own(), tries)
    cases = {"x": [tries["x"]]}
    await both.retry(cases, here)
    assert [one.outcome for one in cases["x"]] == ["failed", "passed"] and len(ledger.items) == 1


async def test_the_end_of_a_session_is_not_cut_off_by_a_duplicate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_children, "HEDGE_MIN_S", 0.0)
    ledger, ended = Ledger(), asyncio.Event()

    async def own() -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        ended.set()

    await children(ledger, Batch(group="", ids=("x",))).hedge(own(), {"x": PASSED})
    assert ended.is_set() and not ledger.items
