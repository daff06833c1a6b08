"""The policy `skip_rest`: when what has not begun is skipped, and what becomes of all that is under way."""

from __future__ import annotations

import pytest
from core_world import FakeWorker, World
from rollout.model.errors import InputError
from rollout.model.item import Failure, ItemSpec, Key, Outcome
from rollout.model.run import Order, Policy, RunState
from rollout_coordinator.core.events import WorkerSpawn

PULL = Failure("image_pull", "429", retry_after_ms=60_000)


def limited(**options: int | str) -> World:
    """Of a run in arrival order."""
    w = World()
    w.open(order=Order.ARRIVAL, policies=(Policy("skip_rest", tuple((k, str(v)) for k, v in options.items())),))
    return w


def outcomes(w: World) -> dict[int, Outcome]:
    return {seq: result[1] for seq, result in sorted(w.ledger.results.get(w.root(), {}).items())}


def end_all(w: World, worker: FakeWorker) -> None:
    worker.finish()
    assert w.view().state is RunState.COMPLETED


def test_units_of_results_and_of_failed_attempts_count_and_the_run_ends_with_what_runs() -> None:
    w = limited(units_out=10, unit_out="tokens")
    a = w.worker("A", credit=2)
    w.submit(6)
    w.seal(6)
    log = w.root()
    a.start()
    a.finish((log, 0), failure=Failure("broken", "", retry_after_ms=60_000), units=(1, 5))
    assert not w.view().skips_rest
    a.start()
    a.finish((log, 1), units=(1, 5))
    assert w.view().skips_rest and w.view().reason == "10 tokens were used, of at most 10"
    assert outcomes(w) == {1: Outcome.DONE, **dict.fromkeys((0, 3, 4, 5), Outcome.SKIPPED)}, "the retry too"
    assert w.ledger.results[log][4][3].code == "rest_skipped"
    a.finish((log, 2), failure=PULL, data=b"why")
    assert w.ledger.results[log][2][:3] == (1, Outcome.FAILED, b"why"), "nothing is tried again"
    view = w.view()
    assert (view.state, view.reason) == (RunState.COMPLETED, "10 tokens were used, of at most 10")
    assert [fields["reason"] for fields in w.events("rest_skipped")] == [view.reason]


def test_what_was_used_before_the_run_counts_and_money_is_told_in_dollars() -> None:
    w = limited(units_out=2_500_000, used_out=2_000_000, unit_out="$")
    a = w.worker("A", credit=1)
    w.submit(3)
    w.seal(3)
    a.start()
    a.finish(units=(0, 400_000))
    assert not w.view().skips_rest
    a.finish(units=(0, 200_000))
    assert w.view().reason == "$2.60 were used, of at most $2.50"


def test_what_a_worker_has_not_begun_is_skipped_and_what_runs_goes_on() -> None:
    w = limited(units_in=1)
    a = w.worker("A", credit=4)
    w.submit(4)
    w.seal(4)
    log = w.root()
    a.start((log, 0), (log, 1))
    a.finish((log, 0), units=(1, 0))
    assert a.revokes
    a.confirm()
    assert list(a.held) == [(log, 1)]
    assert outcomes(w) == {0: Outcome.DONE, 2: Outcome.SKIPPED, 3: Outcome.SKIPPED}
    end_all(w, a)


def test_rows_that_are_in_the_ledger_only_and_those_that_are_submitted_later_are_skipped() -> None:
    w = World(window_items=8)
    w.open(order=Order.ARRIVAL, policies=(Policy("skip_rest", (("units_in", "1"),)),))
    a = w.worker("A", credit=1)
    w.submit(50)
    a.finish(units=(1, 0))
    w.submit(3)
    w.seal(53)
    assert w.view().state is RunState.COMPLETED and (w.view().done, w.view().skipped) == (1, 52)


def test_too_many_items_fail_with_a_code_those_that_are_tried_again_included() -> None:
    w = limited(codes="image_pull,no_space", min_percent=50, after=4)
    a = w.worker("A", credit=10)
    w.submit(10)
    log = w.root()
    a.start()
    a.finish((log, 0))
    a.finish((log, 1), (log, 2), failure=PULL)
    assert not w.view().skips_rest, "two of three, and four are asked for"
    a.finish((log, 3), failure=Failure("other", "", retry_after_ms=0))
    a.finish((log, 3), failure=Failure("no_space", "", retryable=False))
    assert w.view().reason == "3 of 4 items failed (image_pull 2, no_space 1); the limit is 50 % that do not"


def test_an_item_that_is_done_at_last_counts_as_done() -> None:
    w = limited(codes="image_pull", min_percent=60, after=3)
    a = w.worker("A", credit=10)
    w.submit(4, specs=ItemSpec(max_attempts=9))
    log, again = w.root(), Failure("image_pull", "429", retry_after_ms=0)
    for _ in range(3):
        a.finish((log, 0), failure=again)
    w.restart()
    a.hello()
    a.finish((log, 0))
    a.finish((log, 1))
    assert not w.view().skips_rest
    a.finish((log, 2), failure=again)
    a.finish((log, 3), failure=again)
    assert w.view().skips_rest, "two of four"


def test_running_time_is_limited_without_any_result_and_pauses_do_not_count() -> None:
    w = limited(wall_s=100)
    a = w.worker("A", credit=1)
    w.submit(3)
    w.seal(3)
    a.start()
    w.pass_time(50)
    w.verb("pause")
    w.pass_time(1000)
    w.verb("continue")
    w.pass_time(40)
    w.restart()
    a.hello()
    w.pass_time(5)
    assert not w.view().skips_rest
    w.pass_time(20)
    assert w.view().reason == "it has run for 100 s, the longest it may"
    end_all(w, a)
    assert (w.view().done, w.view().skipped) == (1, 2)


def test_a_new_leader_goes_on_skipping() -> None:
    w = limited(units_in=1)
    a, b = w.worker("A", credit=2), w.worker("B", credit=2)
    w.submit(4)
    w.seal(4)
    a.start()
    b.start()
    a.finish((w.root(), 0), units=(1, 0))
    w.restart()
    a.hello()
    a.finish()
    b.alive = False
    w.pass_time(20)
    assert w.view().state is RunState.COMPLETED, "what was lost is not tried again"
    assert outcomes(w)[0] is Outcome.DONE and w.view().skipped == 2


def test_children_of_what_runs_go_on_and_what_they_use_is_not_of_the_runs_own_items() -> None:
    w = limited(units_out=3)
    a = w.worker("A", credit=9)
    w.submit(3)
    log = w.root()
    a.start()

    def spawn(number: int) -> tuple[int, int]:
        w.step(WorkerSpawn(a.session, Key(log, 0), 1, number, [b"%032d" % number], [b"c"], (ItemSpec(),), None, False))
        return next(key for key in a.held if key[0] != log)

    a.finish(spawn(0), units=(0, 7))
    assert not w.view().skips_rest
    a.finish((log, 1), units=(0, 3))
    assert w.view().skips_rest
    a.finish(spawn(1))
    assert w.view().units_out == 10


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "give `units_in`"),
        ({"codes": "a"}, "go together"),
        ({"min_percent": "50"}, "go together"),
        ({"codes": "a", "min_percent": "101"}, "from 1 to 100"),
        ({"units_in": "many"}, "whole number"),
        ({"unit": "1"}, "has no option 'unit'"),
    ],
)
def test_a_policy_that_says_nothing_usable_is_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        limited(**options)
