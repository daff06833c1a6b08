"""What the core answers and asks, where only mutation found that no test looked."""

from __future__ import annotations

import pytest
from core_world import FakeWorker, World
from rollout.model.errors import InputError, UnavailableError
from rollout.model.item import NO_LIMIT, Failure, ItemSpec, Outcome
from rollout.model.run import Policy, RunState
from rollout_coordinator.core import step as st
from rollout_coordinator.core.events import Keys, ResultGroup, WorkerBeat, WorkerProgress, WorkerResults

BAD = Failure("bad", "x", retryable=False)


def scheduled(*policies: Policy, n: int) -> tuple[World, FakeWorker]:
    w = World()
    a = w.worker("A", credit=20)
    w.open(policies=policies)
    w.submit(n, specs=ItemSpec(max_attempts=1))
    w.seal(n)
    return w, a


def test_a_policy_without_options_does_what_it_is_documented_to_do() -> None:
    w, a = scheduled(Policy("append"), n=1)
    a.finish(failure=BAD)
    assert w.view().submitted == 2, "append: what failed, once more"
    w, a = scheduled(Policy("end_run"), n=3)
    a.finish(failure=BAD)
    assert (w.view().state, w.view().cursor) == (RunState.FAILED, 1), "end_run: failed, at the first that fails"


def test_a_run_may_end_as_failed_because_an_item_is_done() -> None:
    w, a = scheduled(Policy("end_run", (("on", "done"), ("state", "failed"))), n=3)
    a.finish()
    assert (w.view().state, w.view().cursor) == (RunState.FAILED, 1)


def test_a_policy_that_cannot_be_is_named() -> None:
    for policy, words in (
        (Policy("stop_early"), "stop_early: give"),
        (Policy("end_run", (("state", "killed"),)), "end_run: `on`"),
    ):
        with pytest.raises(InputError, match=words):
            World().open(policies=(policy,))


def test_a_silent_worker_is_told_to_say_hello_again() -> None:
    w = World()
    a = w.worker("A")
    session = a.session
    w.pass_time(12.0, beat=False)
    (closed,) = w.closed
    assert closed.session == session and isinstance(closed.error, UnavailableError) and closed.error.retryable


def test_a_new_leader_reads_no_row_that_is_final() -> None:
    w, a = scheduled(n=6)
    log = w.root()
    a.finish((log, 0), (log, 1), (log, 2))
    assert w.view().cursor == 3
    w.hold_loads = True
    w.restart()
    a.hello()
    assert [load.from_seq for load in w.loads if isinstance(load, st.LoadPending)] == [3]


def test_a_worker_goes_on_with_the_prefix_it_was_given_last() -> None:
    """Both are warm with it, and the other one's rows come first."""
    w = World()
    a = w.worker("A", credit=1, capacity=(("slots", 1.0),))
    w.open()
    prefixes = [ItemSpec(affinity="g0"), ItemSpec(affinity="g1")]
    w.submit(2, specs=prefixes)
    a.finish()
    w.submit(8, specs=prefixes)
    for _ in range(9):
        a.finish()
    assert [spec.affinity for _, _, spec, _ in a.info.values()] == ["g0", *["g1"] * 5, *["g0"] * 4]


def test_a_chain_waits_a_while_for_the_worker_it_was_at() -> None:
    w = World()
    w.open()
    one = {"credit": 1, "capacity": (("slots", 1.0),)}
    a = w.worker("A", **one)
    chain, plain = ItemSpec(chain="c"), ItemSpec()
    w.submit(1, specs=chain)
    b = w.worker("B", **one)
    w.submit(3, specs=[plain, plain, chain])
    log = w.root()
    a.finish()
    b.finish()
    assert list(a.held) == [(log, 2)] and not b.held, "A is busy, and B leaves it the chain"
    w.pass_time(w.settings.chain_grace - 0.5)
    assert not b.held
    w.pass_time(1.0)
    assert list(b.held) == [(log, 3)]


def test_the_totals_that_metrics_show_count_what_happened() -> None:
    w = World()
    a = w.worker("A", credit=20)
    w.open()
    w.submit(4)
    log = w.root()
    a.start()
    a.finish((log, 0))
    a.finish((log, 1), failure=Failure("again", "x", retryable=True))
    a.alive = False
    w.pass_time(12.0, beat=False)
    b = w.worker("B", credit=20)
    w.pass_time(60.0)
    assert len(b.held) == 3
    totals = {name: value for name, value in w.core.gauges().items() if name.endswith("_total")}
    assert totals == {
        "items_assigned_total": 4 + 1 + 3,
        "items_accepted_total": 1,
        "items_retried_total": 3,
        "items_worker_lost_total": 2,  # the one that was tried again had not begun
        "items_stale_total": 0,
        "items_stolen_total": 0,
    }


def test_a_row_that_is_skipped_counts_beside_rows_that_are_done() -> None:
    w, a = scheduled(n=3)
    log = w.root()
    ends = [Outcome.DONE, Outcome.SKIPPED, Outcome.DONE]
    w.step(WorkerResults(a.session, [ResultGroup(log, [0, 1, 2], [1] * 3, ends, [b""] * 3, {}, [1] * 3)]))
    view = w.view()
    assert (view.state, view.done, view.skipped, view.failed) == (RunState.COMPLETED, 2, 1, 0)


def test_a_worker_that_says_it_leaves_is_shown_with_that_reason() -> None:
    w = World()
    w.worker("A")
    w.step(WorkerBeat("A", "host-A", w.mono, state="draining", cpu_percent=12.5, memory_mib=300))
    (view,) = w.core.worker_views(w.now)
    assert (view.cpu_percent, view.memory_mib) == (12.5, 300)
    assert (view.state, view.reason) == ("draining", "the worker itself asked for it")


def test_attempts_with_a_timeout_leave_memory_when_they_end() -> None:
    w = World()
    a = w.worker("A")
    w.open()
    w.submit(2, specs=ItemSpec(timeout_ms=1000))
    assert len(w.core._state.timed) == 1
    a.finish()
    assert not w.core._state.timed


def test_a_run_may_stop_early_because_enough_is_done() -> None:
    w, a = scheduled(Policy("stop_early", (("successes", "2"),)), n=6)
    log = w.root()
    a.finish((log, 0), failure=BAD)
    a.finish((log, 1))
    assert w.view().state is RunState.RUNNING
    a.finish((log, 2))
    assert (w.view().state, w.view().cursor) == (RunState.COMPLETED, 3)


def test_what_an_attempt_says_of_itself_is_shown_until_it_comes_to_nothing() -> None:
    w, a = scheduled(n=2)
    key = (w.root(), 0)

    def says(note: str, attempt: int = 1) -> None:
        keys = [Keys(w.root(), [0], [attempt])]
        w.step(WorkerProgress(a.session, keys, note, b'{"step": 3}'))

    a.start()
    says("of another attempt", 7)
    assert w.view().note == ""
    says("step 3")
    assert (w.view().note, w.view().figures) == ("step 3", b'{"step": 3}')
    a.finish(key)
    assert w.view().note == "step 3", "it is true until another says more"
    says("late")
    assert w.view().note == "step 3"
    w, a = scheduled(n=2)
    a.start()
    says("step 3")
    a.release((w.root(), 0))
    assert w.view().note == ""


def test_the_figures_of_each_attempt_that_goes_on_are_shown_while_it_is_in_flight() -> None:
    w = World()
    w.open()
    w.submit(2, specs=ItemSpec(max_worker_lost=NO_LIMIT))
    a = w.worker("A")
    a.start()
    for seq in (0, 1, 1):
        w.step(WorkerProgress(a.session, [Keys(w.root(), [seq], [1])], "", b'{"requests": %d}' % seq))
    assert w.view().figures_of_each == [b'{"requests": 0}', b'{"requests": 1}']
    a.release((w.root(), 0))
    assert w.view().figures_of_each == [b'{"requests": 1}']


def test_a_run_that_a_row_ended_says_why_that_row_failed() -> None:
    w, a = scheduled(Policy("end_run"), n=3)
    a.finish((w.root(), 0), failure=Failure("nan", "the loss is nan at step 4\nmore", retryable=False))
    assert w.view().reason == "end_run: row 1 is failed: the loss is nan at step 4"
