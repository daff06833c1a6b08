"""The state of an item is where it is kept, and only the table's moves are possible."""

from __future__ import annotations

from typing import Any

import pytest
from core_world import World
from rollout.model.errors import StateError
from rollout.model.item import Failure, ItemSpec, ItemState, Outcome
from rollout_coordinator.core import items
from rollout_coordinator.core.state import FRESH, AttemptBatch, Log


@pytest.fixture
def log() -> Log:
    """Items 0 accepted behind a gap, 1 assigned, 2 running, 3 pending."""
    w = World()
    a = w.worker("A", credit=3)
    w.open()
    w.submit(4)
    root = w.root()
    a.start((root, 2))
    a.credit = type(a.credit)(2)
    a.hello()
    a.finish((root, 0))
    return w.core._state.logs[root]  # pyright: ignore[reportPrivateUsage]


def batch_of(log: Log, seqs: list[int]) -> AttemptBatch:
    one = log.flight[1]
    return AttemptBatch(99, log, one.info, one.worker, one.assignment, FRESH, seqs, 0.0)


def test_where_an_item_is_kept_is_its_state(log: Log) -> None:
    states = [items.state_of(log, seq) for seq in range(4)]
    assert states == [ItemState.ACCEPTED, ItemState.ASSIGNED, ItemState.RUNNING, ItemState.PENDING]


@pytest.mark.parametrize("seq", [0, 1, 2])
def test_only_a_pending_item_is_assigned_or_closed(log: Log, seq: int) -> None:
    with pytest.raises(StateError):
        items.assign(batch_of(log, [seq]))
    with pytest.raises(StateError):
        items.close(log, [seq])


@pytest.mark.parametrize("seq", [0, 3])
def test_only_an_attempt_in_flight_ends(log: Log, seq: int) -> None:
    with pytest.raises(StateError):
        items.end(log.flight[1], [1, seq], "result")


def test_an_attempt_does_not_end_an_item_that_is_another_attempts(log: Log) -> None:
    with pytest.raises(StateError):
        items.end(batch_of(log, [1]), [1], "result")


@pytest.mark.parametrize("cause", ["assign", "commit_done", "unheard of"])
def test_an_attempt_ends_only_as_the_table_says(log: Log, cause: str) -> None:
    with pytest.raises(StateError, match="possible now"):
        items.end(log.flight[2], [2], cause)


@pytest.mark.parametrize("seq", [1, 2, 3])
def test_only_an_accepted_item_is_final(log: Log, seq: int) -> None:
    with pytest.raises(StateError):
        items.commit(log, seq, Outcome.DONE)


def test_what_is_missing_from_an_adopted_batch_may_have_begun_though_the_rest_has_not() -> None:
    """Its worker says Hello to a new leader with one of two items of a batch: the other must not run twice."""
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(2, specs=ItemSpec(fail_on_worker_lost=True))
    a.start()
    w.restart()
    first, second = sorted(a.held)
    a.started.discard(first)
    a.started.discard(second)
    del a.held[second]
    a.hello()
    failures: dict[int, Any] = {seq: row[3] for seq, row in w.ledger.results[w.root()].items()}
    assert isinstance(failures[second[1]], Failure) and failures[second[1]].code == "worker_lost"
    assert list(a.held) == [first]
