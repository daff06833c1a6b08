"""An attempt that fails: what it leaves behind, how long the next waits, where it goes and what it knows."""

from __future__ import annotations

from core_world import World
from rollout.model.item import AttemptEnd, Failure, ItemSpec, Outcome
from rollout_coordinator.core.step import Evidence

BROKEN = Failure("broken", "it broke")
AT_ONCE = Failure("broken", "it broke", retry_after_ms=0)
OBJECT = b"o" * 32


def test_a_failed_attempt_leaves_evidence_and_its_units_count_and_so_does_the_last() -> None:
    w = World()
    w.open()
    a = w.worker("A")
    w.submit(1, specs=ItemSpec(max_attempts=2))
    item = (w.root(), 0)
    a.finish(item, failure=AT_ONCE, data=b"why", keeps=(OBJECT,), units=(3, 4))
    row = w.ledger.attempts[*item, 1]
    assert (row.end, row.left) == (AttemptEnd.FAILED, Evidence(b"why", (OBJECT,), 3, 4))
    a.finish(item, failure=AT_ONCE, data=b"still", keeps=(b"p" * 32,), units=(5, 6))
    assert w.ledger.results[w.root()][0] == (2, Outcome.FAILED, b"still", AT_ONCE)
    assert w.ledger.kept[item] == (OBJECT, b"p" * 32)
    assert (w.view().units_in, w.view().units_out) == (8, 10)


def test_an_attempt_knows_how_many_failed_before_also_under_a_new_leader() -> None:
    w = World()
    w.open()
    a = w.worker("A")
    w.submit(2, specs=ItemSpec(max_attempts=5))
    item = (w.root(), 0)
    a.finish(item, failure=AT_ONCE)
    assert a.failures == {item: 1}
    a.release(item)
    a.finish(item, failure=AT_ONCE)
    assert a.failures == {item: 2}, "one that was given back is none"
    a.release(item)
    w.restart()
    a.hello()
    assert a.failures == {item: 2} and a.held[item] == 5


def test_it_waits_for_as_long_as_its_failure_says_also_under_a_new_leader_whose_clock_jumped() -> None:
    w = World()
    w.open()
    a = w.worker("A")
    w.submit(1)
    item = (w.root(), 0)
    a.finish(item, failure=Failure("rate_limit", "later", retry_after_ms=900_000))
    w.pass_time(600.0)
    assert not a.held and w.view().in_flight == 0
    w.restart()
    a.hello()
    w.pass_time(299.0)
    assert not a.held
    w.pass_time(2.0)
    assert a.held == {item: 2}
    a.finish(item, failure=Failure("rate_limit", "later", retry_after_ms=5_000))
    w.wall -= 1_500_000
    w.restart()
    a.hello()
    w.pass_time(1000.0)
    assert a.held == {item: 3}, "never longer than the longest of its delays"


def test_the_next_attempt_goes_to_another_worker_that_has_room() -> None:
    w = World()
    w.open()
    a = w.worker("A", credit=2)
    w.submit(3)
    item = (w.root(), 0)
    b = w.worker("B", credit=9)
    b.finish()
    a.finish(item, failure=AT_ONCE)
    assert b.held[item] == 2 and item not in a.held
    b.finish(item, failure=AT_ONCE)
    assert a.held[item] == 3


def test_it_waits_a_while_for_one_that_is_busy_and_nothing_waits_behind_it() -> None:
    w = World()
    w.open()
    a, b = w.worker("A", credit=1), w.worker("B", credit=1)
    w.submit(5)
    item = next(iter(a.held))
    (other,) = b.held
    b.start(other)
    a.finish(item, failure=AT_ONCE)
    assert list(a.held) == [(w.root(), 2)], "it goes on with others"
    a.start()
    b.finish(other)
    assert list(b.held) == [item]
    b.start(item)
    a.finish((w.root(), 2))
    b.finish(item, failure=AT_ONCE)
    w.pass_time(w.settings.another_worker_grace - 1)
    assert list(a.held) == [(w.root(), 3)] and list(b.held) == [(w.root(), 4)]
    b.finish((w.root(), 4))
    w.pass_time(0.5)
    assert not b.held, "for A, which is busy with the last other"
    w.pass_time(1.0)
    assert list(b.held) == [item], "no longer"


def test_where_there_is_no_other_worker_it_goes_to_the_same_before_later_items() -> None:
    w = World()
    w.open()
    w.worker("A", labels=(("kind", "other"),))
    b = w.worker("B", credit=2, labels=(("kind", "this"),))
    w.submit(5, specs=ItemSpec(require_labels=(("kind", "this"),)))
    b.finish((w.root(), 0), failure=AT_ONCE)
    assert sorted(b.held) == [(w.root(), 1), (w.root(), 2)]
    b.finish()
    assert sorted(b.held) == [(w.root(), 0), (w.root(), 3)]


def test_a_new_leader_knows_where_it_failed() -> None:
    w = World()
    w.open()
    a, b = w.worker("A", credit=1), w.worker("B", credit=1)
    w.submit(2)
    item = next(iter(a.held))
    a.finish(item, failure=Failure("broken", "it broke", retry_after_ms=1000))
    w.restart()
    a.hello()
    b.hello()
    w.pass_time(2.0)
    assert not a.held
    b.finish()
    assert list(b.held) == [item]
    w.restart()
    a.hello()
    b.hello()
    b.release(item)
    assert list(a.held) == [] and list(b.held) == [item], "adopted, and given back: it still failed on A"


def test_the_worker_on_which_it_failed_does_not_steal_it() -> None:
    w = World()
    w.open()
    a = w.worker("A", credit=2)
    w.submit(1)
    item = (w.root(), 0)
    b = w.worker("B", credit=8)
    a.finish(item, failure=AT_ONCE)
    assert list(b.held) == [item]
    w.pass_time(3.0)
    assert not b.revokes
    w.pass_time(w.settings.another_worker_grace)
    assert b.revokes, "but B has sat on it for long"


def test_an_item_of_a_chain_goes_to_another_worker_and_its_successor_waits() -> None:
    w = World()
    w.open()
    a = w.worker("A")
    w.submit(2, specs=ItemSpec(chain="c"))
    first = (w.root(), 0)
    b = w.worker("B")
    a.finish(first, failure=AT_ONCE)
    assert list(b.held) == [first] and not a.held
