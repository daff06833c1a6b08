"""Submitting, the cursor, policies, runs as a whole, replay."""

from __future__ import annotations

from safeguard import CORE, Safeguard, cut, never

COMMIT, SUBMIT, POLICIES = f"{CORE}commit", f"{CORE}submit", f"{CORE}policies"
RUNS, VERBS, REPLAY = f"{CORE}runs", f"{CORE}verbs", f"{CORE}replay"

SAFEGUARDS = (
    Safeguard(
        "cursor contiguity",
        "The cursor never passes an item without a final result.",
        cut(f"{CORE}ranges:Ranges.advance", "while lo and lo[0] <= cursor:", "while lo:"),
        (
            "core/test_core_guards.py::test_a_lane_keeps_its_cap_when_a_parent_goes_on",
            "core/test_core_scenarios_dispatch.py::test_lane_caps_and_run_cap",
        ),
        simulated=True,
    ),
    Safeguard(
        "cursor contiguity under policies",
        "Policies see results in schedule order, without a gap.",
        cut(f"{COMMIT}:advance", "while log.cursor in log.accepted and", "while log.cursor < log.submitted and"),
        ("core/test_core_guards_dispatch.py::test_dispatch_does_not_run_far_ahead_of_a_straggler",),
    ),
    Safeguard(
        "outcomes are read before the cursor moves",
        "After a restart policies miss no result that was accepted before.",
        cut(f"{REPLAY}:reopen", "log.rereading = True", "log.rereading = False"),
        ("core/test_core_guards_commit.py::test_policies_see_what_was_accepted_under_the_last_leader",),
    ),
    Safeguard(
        "the cursor stops with its run",
        "Nothing is committed behind the result that ended the run.",
        cut(f"{COMMIT}:advance", ' and log.run.state.value in ("running", "paused", "interrupted")', ""),
        ("core/test_core_guards_commit.py::test_nothing_is_committed_behind_the_result_that_ended_the_run",),
    ),
    Safeguard(
        "completed means sealed",
        "A run does not end while its client is still submitting.",
        cut(f"{COMMIT}:finish_if_complete", "root.sealed and ", ""),
        ("core/test_core_guards_commit.py::test_a_run_waits_for_its_seal",),
    ),
    Safeguard(
        "completed means committed",
        "A run ends when its last item has a final result.",
        cut(f"{COMMIT}:finish_if_complete", "root.cursor >= root.submitted and ", ""),
        (
            "core/test_core_scenarios.py::test_a_run_completes",
            "core/test_core_guards_dispatch.py::test_fresh_rows_do_not_pass_rows_that_are_on_disk_only",
        ),
    ),
    Safeguard(
        "ended runs do not end again",
        "A late result changes nothing in a run that was killed.",
        cut(f"{COMMIT}:finish_if_complete", " and runs.live(run)", ""),
        (
            "core/test_core_guards.py::test_a_hello_with_an_old_attempt_does_not_keep_the_present_one",
            "core/test_core_scenarios.py::test_failures_retry_with_backoff_then_fail",
        ),
    ),
    Safeguard(
        "appended items belong to the run",
        "A run does not complete while a policy has still to append.",
        never(f"{COMMIT}:finish_if_complete", "policies.wants_more(c, run)"),
        ("core/test_core_guards_commit.py::test_a_run_is_not_complete_while_items_are_to_be_appended",),
    ),
    Safeguard(
        "seal count",
        "A run is sealed only with as many items as its client has sent.",
        cut(f"{SUBMIT}:seal", "if event.count != count:", "if False:"),
        ("core/test_core_scenarios_runs.py::test_submit_is_idempotent_and_says_what_differs",),
    ),
    Safeguard(
        "dedupe on submit (run, seq)",
        "Items that are sent again are found, not appended again.",
        cut(f"{SUBMIT}:add_items", "known = min(n, log.submitted - first)", "known = 0"),
        (
            "core/test_core_scenarios_runs.py::test_a_submit_that_is_compared_is_answered_though_its_run_is_deleted",
            "core/test_core_scenarios_runs.py::test_submit_is_idempotent_and_says_what_differs",
        ),
    ),
    Safeguard(
        "dedupe on submit (id)",
        "Another item at a place that is taken is an error.",
        cut(f"{SUBMIT}:add_items", "if old != new:", "if False:"),
        ("core/test_core_scenarios_runs.py::test_submit_is_idempotent_and_says_what_differs",),
    ),
    Safeguard(
        "no gap in a submission",
        "Items that skip a place are refused.",
        never(f"{SUBMIT}:add_items", "first > log.submitted"),
        ("core/test_core_scenarios_runs.py::test_submit_is_idempotent_and_says_what_differs",),
    ),
    Safeguard(
        "columns of a submission",
        "A batch whose columns differ in length is refused whole.",
        cut(
            f"{SUBMIT}:add_items",
            "if n != len(payloads) or (n and not specs) or (spec_index is not None and len(spec_index) != n):",
            "if False:",
        ),
        ("core/test_core_guards_commit.py::test_columns_that_disagree_are_refused_whole",),
    ),
    Safeguard(
        "sealed runs take no items",
        "Nothing is added behind the count that was sealed.",
        never(f"{SUBMIT}:refusal", "run.root.sealed"),
        ("core/test_core_guards_commit.py::test_a_sealed_run_takes_no_items",),
    ),
    Safeguard(
        "ended runs take no items",
        "Nothing is acknowledged that will never run.",
        never(f"{SUBMIT}:refusal", "runs.ended(run)"),
        ("core/test_core_guards_commit.py::test_an_ended_run_takes_no_items",),
    ),
    Safeguard(
        "submits in order",
        "A batch does not overtake one that is still compared with the ledger.",
        cut(
            f"{SUBMIT}:submit_items",
            "if run.root.checking:",
            "if False:",
        ),
        ("core/test_core_guards_commit.py::test_batches_and_the_seal_keep_their_order_while_the_first_is_compared",),
    ),
    Safeguard(
        "the seal waits for items before it",
        "A seal does not overtake a batch that is still compared with the ledger.",
        cut(f"{SUBMIT}:seal", "if root.checking:", "if False:"),
        ("core/test_core_guards_commit.py::test_batches_and_the_seal_keep_their_order_while_the_first_is_compared",),
    ),
    Safeguard(
        "one configuration a run",
        "The same run id with another configuration is refused.",
        never(f"{SUBMIT}:open_submit", "different"),
        ("core/test_core_scenarios_runs.py::test_submit_is_idempotent_and_says_what_differs",),
    ),
    Safeguard(
        "ended runs are found on disk",
        "A run of an earlier leader is not opened anew under its id.",
        cut(f"{SUBMIT}:open_submit", "if replay.ask_for(c, event.spec.run_id, open_submit, event):", "if False:"),
        (
            "core/test_core_guards_commit.py::test_an_ended_run_that_is_opened_again_is_the_one_on_disk",
            "core/test_core_tables.py::test_an_ended_run_of_an_earlier_leader_is_found_again",
        ),
    ),
    Safeguard(
        "a run that ends takes its attempts back",
        "Killed work stops, and its late results are stale.",
        cut(f"{RUNS}:end", "drop_flight(c, run, ", "(lambda *a, **_: None)(c, run, "),
        (
            "core/test_core_guards.py::test_killed_work_stops_and_its_late_results_count_for_nothing",
            "core/test_core_scenarios_runs.py::test_pause_resume_interrupt_continue_kill_delete",
        ),
    ),
    Safeguard(
        "exclusive attempts outlive their run",
        "A killed run goes on with an exclusive item once its worker has stopped it.",
        never(f"{RUNS}:drop_flight", "grant.info.spec.exclusive and not all"),
        (
            "core/test_core_survivors.py::test_a_killed_run_goes_on_with_an_exclusive_item_once_its_worker_has_stopped_it",
        ),
        simulated=True,
    ),
    Safeguard(
        "survivors are cancelled again",
        "An order to stop that was lost with its stream is given on the next one.",
        never(f"{CORE}workers:hello", "run.state in ENDED"),
        ("core/test_core_survivors.py::test_the_order_to_stop_is_given_again_on_a_new_stream",),
    ),
    Safeguard(
        "results of survivors",
        "An attempt that outlived its run brings no result.",
        never(f"{CORE}results:take_group", "log.run.state in ENDED"),
        (
            "core/test_core_survivors.py::test_nothing_comes_of_what_outlived_its_run[result]",
            "core/test_core_survivors.py::test_nothing_comes_of_what_outlived_its_run[failure]",
        ),
    ),
    Safeguard(
        "ends of survivors",
        "An attempt that outlived its run counts neither as failed nor as lost.",
        never(f"{CORE}attempts:end_attempt", "grant.log.run.state in ENDED"),
        ("core/test_core_survivors.py::test_nothing_comes_of_what_outlived_its_run[lost]",),
    ),
    Safeguard(
        "lost survivors",
        "An attempt that outlived its run is not the last one of its item, wherever it ended.",
        cut(f"{CORE}workers:lose", " if grant.log.run.state not in ENDED else None", ""),
        (
            "core/test_core_survivors.py::test_nothing_comes_of_what_outlived_its_run[lost]",
            "core/test_core_survivors.py::test_nothing_comes_of_what_outlived_its_run[restart]",
        ),
    ),
    Safeguard(
        "overdue survivors",
        "An attempt that outlived its run does not time out.",
        cut(f"{CORE}quarantine:overdue", " and grant.log.run.state not in ENDED", ""),
        ("core/test_core_survivors.py::test_nothing_comes_of_what_outlived_its_run[released]",),
    ),
    Safeguard(
        "children of survivors",
        "A parent that outlived its run adds nothing to it.",
        cut(f"{CORE}spawn:holder", " if not runs.ended(grant.log.run) else None", ""),
        ("core/test_core_survivors.py::test_nothing_comes_of_what_outlived_its_run[released]",),
    ),
    Safeguard(
        "survivors leave with their last",
        "An ended run is not read by every later leader.",
        never(f"{CORE}attempts:close", "over and run.survivors"),
        ("core/test_core_survivors.py::test_nothing_comes_of_what_outlived_its_run[released]",),
    ),
    Safeguard(
        "attempts in flight hold their chain",
        "The next item does not begin while one before it is still being stopped, or runs since the leader before.",
        cut(f"{REPLAY}:reopen", "hold_chains(log)", "pass"),
        ("core/test_core_survivors.py::test_an_exclusive_item_of_a_chain_that_is_stopping_holds_its_chain",),
    ),
    Safeguard(
        "a run that ends drops its window",
        "Nothing pending of a killed run is handed out.",
        cut(f"{RUNS}:end", "shut(c, log)", "pass"),
        (
            "core/test_core_scenarios_dispatch.py::test_what_was_stolen_from_a_run_that_ends_is_not_waited_for",
            "core/test_core_scenarios_runs.py::test_pause_resume_interrupt_continue_kill_delete",
        ),
    ),
    Safeguard(
        "unlisted transitions",
        "A state changes only as its table says.",
        cut(f"{CORE}tables:Table.move", "if after is None:", "if False:"),
        ("core/test_core_tables.py::test_an_unlisted_transition_raises",),
    ),
    Safeguard(
        "verbs heed the run's state",
        "A verb that the run's state does not allow is refused with a hint.",
        never(f"{VERBS}:command", "not RUN.allows(run.state, verb)"),
        ("core/test_core_guards.py::test_a_verb_that_the_state_does_not_allow_is_answered",),
    ),
    Safeguard(
        "only ended runs are deleted",
        "Work in progress is not thrown away by a slip.",
        never(f"{VERBS}:delete", "not event.force"),
        ("core/test_core_guards.py::test_a_verb_that_the_state_does_not_allow_is_answered",),
    ),
    Safeguard(
        "rows of a deleted run are not written after it",
        "A deletion leaves no orphan behind.",
        cut(f"{VERBS}:delete", "forget_writes(c, run)", "pass"),
        ("core/test_core_guards.py::test_a_deletion_leaves_no_row_of_its_own_step",),
    ),
    Safeguard(
        "deadline of a pause",
        "A run whose attempts do not stop says so, with its survivors.",
        cut(f"{VERBS}:deadlines", "elif c.now.wall_ms >= run.pausing_until_ms:", "elif False:"),
        ("core/test_core_scenarios_runs.py::test_pause_resume_interrupt_continue_kill_delete",),
    ),
    Safeguard(
        "a group is won once",
        "A second success of a group does not settle it again.",
        cut(f"{POLICIES}:committed", " and group not in log.groups", ""),
        ("core/test_core_guards_commit.py::test_the_first_success_of_a_group_ends_the_others",),
        covered_by="group cancel",
    ),
    Safeguard(
        "group cancel",
        "The first success of a group cancels the others.",
        cut(
            f"{POLICIES}:committed",
            "settle(c, log, log.run.by_group[group], sorted(members), seq, flight=True)",
            "pass",
        ),
        ("core/test_core_guards_commit.py::test_the_first_success_of_a_group_ends_the_others",),
    ),
    Safeguard(
        "members of a group: those in flight",
        "Who was given out is found when the group is won, also by a leader that did not give it out.",
        cut(f"{CORE}attempts:open_grant", "if grant.info.spec.group:", "if False:"),
        (
            "core/test_core_guards_commit.py::test_the_first_success_of_a_group_ends_the_others",
            "core/test_core_guards_commit.py::test_a_group_that_was_won_stays_won_under_the_next_leader",
        ),
    ),
    Safeguard(
        "members of a group: those accepted before the leader led",
        "A result that waits for its turn under a new leader is skipped when its group is won before it.",
        cut(f"{CORE}replay:read_page", "if log.run.specs[spec].spec.group:", "if False:"),
        ("core/test_core_guards_commit.py::test_a_group_that_was_won_stays_won_under_the_next_leader",),
    ),
    Safeguard(
        "a group stays won under the next leader",
        "A member that comes after the winner's leader is gone does not run.",
        cut(f"{CORE}replay:restore_runs", "log.groups.setdefault(group, seq)", "pass"),
        ("core/test_core_guards_commit.py::test_a_group_that_was_won_stays_won_under_the_next_leader",),
    ),
    Safeguard(
        "a group is won by what is committed",
        "A result behind the cursor that another may still precede is nobody's win yet.",
        cut("rollout_coordinator.ledger.reads:Replay.grouped", "else log.cursor", "else SEQ_MAX"),
        ("contract/test_ledger_reads.py::test_who_won_the_groups_is_read_from_what_is_committed[sqlite-schedule]",),
    ),
    Safeguard(
        "won groups take nothing into the window",
        "A member that is read back after its group was won does not run.",
        cut(f"{CORE}window:decided", "if winner is not None:", "if False:"),
        ("core/test_core_guards_commit.py::test_the_first_success_of_a_group_ends_the_others",),
    ),
    Safeguard(
        "pruned lanes take nothing into the window",
        "An item that is read back after its lane was pruned does not run.",
        cut(f"{CORE}window:decided", "if info.lane.pruned_at >= 0:", "if False:"),
        ("core/test_core_guards_commit.py::test_a_pruned_lane_skips_what_is_behind_its_prune_point",),
    ),
    Safeguard(
        "pruned results stay as evidence",
        "Results behind a prune point become skipped in the ledger too.",
        cut(f"{POLICIES}:settle", "c.step.writes.prune.append((log.id, later, seq))", "pass"),
        (
            "core/test_core_guards_commit.py::test_a_pruned_lane_skips_what_is_behind_its_prune_point",
            "core/test_core_guards_commit.py::test_the_first_success_of_a_group_ends_the_others",
        ),
    ),
    Safeguard(
        "open attempts survive a restart",
        "A new leader adopts what is in flight and does not run it twice.",
        cut(f"{REPLAY}:restore", "restore_attempts(c, snapshot, now)", "pass"),
        (
            "core/test_core_guards_dispatch.py::test_an_adopted_attempt_keeps_its_chain_busy",
            "core/test_core_guards_dispatch.py::test_a_row_whose_result_came_while_it_was_read_does_not_run_again",
        ),
        simulated=True,
    ),
    Safeguard(
        "adopted attempts may have begun",
        "on_worker_lost = fail holds for an attempt of the last leader.",
        cut(f"{REPLAY}:restore_attempts", "grant.unsure = True", "pass"),
        (
            "core/test_core_guards_dispatch.py::test_what_is_known_from_the_ledger_only_is_not_asked_back",
            "core/test_core_guards.py::test_what_must_not_run_twice_may_have_begun_under_the_last_leader",
        ),
    ),
    Safeguard(
        "numbers go on after a restart",
        "A new leader gives no log or batch a number that is in use.",
        cut(f"{REPLAY}:restore", "c.next_log, c.next_batch = snapshot.next_log, snapshot.next_batch", "pass"),
        (
            "core/test_core_guards_dispatch.py::test_a_chain_gets_its_predecessors_result_from_the_ledger",
            "core/test_core_guards_dispatch.py::test_a_backoff_outlives_the_leader",
        ),
        simulated=True,
    ),
    Safeguard(
        "known workers get a full deadline",
        "A new leader waits for the workers of the last one before it takes their work.",
        cut(
            f"{REPLAY}:restore",
            "heard(c, worker, now.mono)",
            "worker.due_at = now.mono - 60",
        ),
        (
            "core/test_core_guards_dispatch.py::test_an_adopted_attempt_keeps_its_chain_busy",
            "core/test_core_guards_dispatch.py::test_a_row_whose_result_came_while_it_was_read_does_not_run_again",
        ),
    ),
)
