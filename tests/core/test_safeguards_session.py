"""Each safeguard of the session, turned off: the scenario that is there for it fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import test_devices as devices
import test_session_guards as guards
import test_session_leaving as leaving
import test_session_processes as processes
import test_session_scenarios as scenarios
from rollout.model.errors import ProtocolError
from rollout_worker.safeguards import ALL, Safeguards
from session_world import Worker

CAUGHT_BY: dict[str, Callable[[], None]] = {
    "older_streams_ignored": scenarios.test_frames_of_older_streams_are_ignored_and_odd_ones_are_faults,
    "welcome_first": scenarios.test_frames_of_older_streams_are_ignored_and_odd_ones_are_faults,
    "hello_lists_held": scenarios.test_hello_lists_what_is_held_and_results_wait_for_welcome,
    "results_kept": scenarios.test_an_item_from_assignment_to_acceptance,
    "dropped_stops": scenarios.test_welcome_drops_what_was_given_to_others,
    "told_twice_runs_once": guards.test_an_assignment_told_twice_runs_once,
    "begun_not_given_up": scenarios.test_only_unstarted_attempts_are_given_up_to_a_thief,
    "process_asked_first": guards.test_what_waits_in_a_process_is_given_up_only_when_that_lets_it_go,
    "starts_told_first": scenarios.test_only_unstarted_attempts_are_given_up_to_a_thief,
    "self_fence": leaving.test_an_orphan_drops_everything_after_its_grace,
    "fence_from_send": leaving.test_the_fence_counts_from_the_send_of_what_was_acknowledged,
    "fenced_starts_nothing": leaving.test_the_fence_stops_starts_and_results_and_kills_the_exclusive,
    "fenced_tells_nothing": leaving.test_the_fence_stops_starts_and_results_and_kills_the_exclusive,
    "fence_holds_engines": leaving.test_the_fence_holds_what_waits_in_an_engine_until_it_is_lifted,
    "fence_kills_exclusive": leaving.test_the_fence_stops_starts_and_results_and_kills_the_exclusive,
    "guard_told": guards.test_a_process_is_killed_though_its_daemon_stands_still_while_it_runs_an_exclusive_attempt,
    "killed_held_until_ended": lambda: (
        guards.test_an_exclusive_attempt_that_the_fence_killed_is_held_until_its_process_has_ended(True)
    ),
    "notice_told_first": leaving.test_a_notice_is_told_before_anything_that_comes_of_it,
    "drain_waits": leaving.test_a_drain_releases_the_unstarted_finishes_the_rest_and_says_goodbye,
    "attempt_checked": guards.test_what_a_process_says_of_another_attempt_is_ignored,
    "crash_costs_what_ran": processes.test_a_crash_is_a_loss_of_what_ran_and_of_nothing_behind_it,
    "suspects_run_alone": processes.test_an_isolated_attempt_runs_alone_in_its_engine,
    "failed_start_costs_none": processes.test_an_executor_that_cannot_start_costs_no_attempt,
    "causes_told_first": processes.test_why_an_executor_cannot_start_is_told_before_its_attempts_come_back,
    "timeouts": scenarios.test_a_timeout_counts_from_the_start_and_is_reported_once_the_attempt_is_over,
    "cancel_enforced": scenarios.test_cancel_reaches_the_process_which_is_killed_if_it_does_not_let_go,
    "stored_before_told": guards.test_a_large_result_is_told_only_when_it_is_stored,
    "parents_go_first": devices.test_what_needs_the_device_of_a_parent_that_waits_long_goes_back,
    "devices_leased": lambda: devices.test_no_device_is_given_twice_and_none_leaks(0),
}
NOTICED = (AssertionError, KeyError, ValueError, ProtocolError, pytest.fail.Exception)


def test_every_safeguard_has_its_scenario() -> None:
    assert list(CAUGHT_BY) == [field.name for field in fields(Safeguards)]


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_a_session_without_it_fails_its_scenario(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "safeguards", replace(ALL, **{name: False}))
    with pytest.raises(NOTICED):
        CAUGHT_BY[name]()
