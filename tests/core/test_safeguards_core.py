"""Each safeguard of the core, turned off: the scenario that is there for it fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import test_core_causes as causes
import test_core_evidence as evidence
import test_core_guards as guards
import test_core_guards_commit as commit
import test_core_guards_dispatch as dispatch
import test_core_hand_over as hand_over
import test_core_items as items
import test_core_preemption as preemption
import test_core_quarantine as quarantine
import test_core_rest as rest
import test_core_scenarios as scenarios
import test_core_scenarios_children as children
import test_core_scenarios_dispatch as sharing
import test_core_scenarios_runs as runs
import test_core_survivors as survivors
from core_world import World
from rollout.config.settings import CoordinatorSettings
from rollout.model.errors import StateError
from rollout_coordinator.core.safeguards import ALL, Safeguards

CAUGHT_BY: dict[str, Callable[[], object]] = {
    "cursor_contiguous": dispatch.test_dispatch_does_not_run_far_ahead_of_a_straggler,
    "cursor_stops_with_run": commit.test_nothing_is_committed_behind_the_result_that_ended_the_run,
    "sealed_before_complete": commit.test_a_run_waits_for_its_seal,
    "committed_before_complete": scenarios.test_a_run_completes,
    "outcomes_reread": commit.test_policies_see_what_was_accepted_under_the_last_leader,
    "submitted_once": runs.test_submit_is_idempotent_and_says_what_differs,
    "ids_compared": runs.test_submit_is_idempotent_and_says_what_differs,
    "submits_in_order": commit.test_batches_and_the_seal_keep_their_order_while_the_first_is_compared,
    "sealed_takes_nothing": commit.test_a_sealed_run_takes_no_items,
    "ended_runs_on_disk": commit.test_an_ended_run_that_is_opened_again_is_the_one_on_disk,
    "end_takes_attempts_back": guards.test_killed_work_stops_and_its_late_results_count_for_nothing,
    "exclusive_outlives_run": (
        survivors.test_a_killed_run_goes_on_with_an_exclusive_item_once_its_worker_has_stopped_it
    ),
    "deleted_rows_unwritten": guards.test_a_deletion_leaves_no_row_of_its_own_step,
    "present_attempt_only": guards.test_a_late_result_of_an_attempt_given_back_is_stale,
    "holder_only": guards.test_only_the_holder_starts_ends_or_gives_back_an_attempt,
    "once_a_message": guards.test_a_result_told_twice_counts_once,
    "newest_stream_only": guards.test_frames_of_a_session_that_is_gone_are_ignored,
    "never_given_is_a_fault": guards.test_an_attempt_that_was_never_given_quarantines_and_costs_nobody_else,
    "attempts_limited": scenarios.test_failures_retry_with_backoff_then_fail,
    "losses_limited": scenarios.test_a_killer_item_is_isolated_and_becomes_a_dead_letter,
    "preemption_costs_none": preemption.test_nothing_that_is_lost_after_a_notice_counts,
    "leaving_hand_over_only": hand_over.test_a_worker_that_stays_cannot_give_it_back_for_ever,
    "lost_is_final": guards.test_what_must_not_run_twice_does_not_after_a_loss,
    "lost_work_runs_again": scenarios.test_a_silent_worker_fails_once_and_its_items_run_elsewhere,
    "retried_elsewhere": evidence.test_the_next_attempt_goes_to_another_worker_that_has_room,
    "hello_returns_missing": guards.test_what_must_not_run_twice_does_not_after_a_hello_without_it,
    "stall_moves_deadlines": guards.test_a_coordinator_that_was_stopped_fails_nobody,
    "deadlines_only_grow": guards.test_a_beat_handled_late_does_not_shorten_a_deadline,
    "quarantine_for_good": scenarios.test_stale_and_impossible_results,
    "exclusive_waits_for_fence": quarantine.test_exclusive_items_of_a_quarantined_worker_wait_for_its_fence,
    "one_host_a_worker": quarantine.test_a_worker_is_heard_on_its_own_host_only,
    "overdue_ended": commit.test_an_attempt_whose_worker_does_not_enforce_its_timeout_ends,
    "running_runs_only": runs.test_pause_resume_interrupt_continue_kill_delete,
    "failed_starts_wait": causes.test_a_worker_that_cannot_start_them_gets_no_items_before_its_next_try,
    "hopeless_runs_end": causes.test_a_cause_on_every_worker_ends_the_run_and_harms_no_item,
    "ready_workers_only": dispatch.test_a_draining_worker_gets_nothing_though_it_tells_credit,
    "run_cap": sharing.test_lane_caps_and_run_cap,
    "lane_cap": sharing.test_lane_caps_and_run_cap,
    "one_worker": sharing.test_a_run_is_on_one_worker_at_a_time_and_stays_there,
    "strict_resources": dispatch.test_strict_resources_are_not_overcommitted,
    "exclusive_not_pipelined": survivors.test_an_exclusive_item_of_a_chain_that_is_stopping_holds_its_chain,
    "pipelined_needs_final": dispatch.test_a_pipelined_result_before_its_predecessors_is_dropped,
    "begun_not_stolen": dispatch.test_what_has_begun_is_not_asked_back,
    "adopted_not_stolen": dispatch.test_what_is_known_from_the_ledger_only_is_not_asked_back,
    "rest_taken_back": rest.test_what_a_worker_has_not_begun_is_skipped_and_what_runs_goes_on,
    "one_steal_a_victim": dispatch.test_a_victim_is_asked_once_at_a_time,
    "present_parent_spawns": commit.test_an_attempt_that_was_taken_away_makes_no_children,
    "children_end_with_parent": children.test_a_parent_that_is_done_ends_its_children,
    "group_ends_others": commit.test_the_first_success_of_a_group_ends_the_others,
    "pruned_are_skipped": commit.test_a_pruned_lane_skips_what_is_behind_its_prune_point,
    "adopted_in_flight": dispatch.test_an_adopted_attempt_keeps_its_chain_busy,
    "adopted_may_have_begun": items.test_what_is_missing_from_an_adopted_batch_may_have_begun_though_the_rest_has_not,
}
NOTICED = (AssertionError, KeyError, StateError, pytest.fail.Exception)


def test_every_safeguard_has_its_scenario() -> None:
    assert list(CAUGHT_BY) == [field.name for field in fields(Safeguards)]


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_a_core_without_it_fails_its_scenario(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "safeguards", replace(ALL, **{name: False}))
    with pytest.raises(NOTICED):
        CAUGHT_BY[name]()


def test_no_configuration_turns_one_off() -> None:
    assert "safeguards" not in json.dumps(CoordinatorSettings.model_json_schema())
