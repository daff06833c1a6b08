"""Results, sessions and liveness: what workers say, and what the core believes of it."""

from __future__ import annotations

from removal import Edit
from safeguard import CORE, Safeguard, cut, never

RESULTS, WORKERS, QUARANTINE = f"{CORE}results", f"{CORE}workers", f"{CORE}quarantine"

SAFEGUARDS = (
    Safeguard(
        "attempt check on results",
        "A result of an attempt that was taken away is not accepted in place of the present one.",
        cut(f"{RESULTS}:take_group", "grant.attempt != attempts[i]", "False"),
        ("core/test_core_guards.py::test_a_late_result_of_an_attempt_given_back_is_stale",),
    ),
    Safeguard(
        "holder check on results",
        "Only the worker that holds an attempt may end it.",
        cut(f"{RESULTS}:take_group", "grant.worker is not worker", "False"),
        (
            "core/test_core_guards.py::test_only_the_holder_starts_ends_or_gives_back_an_attempt",
            "core/test_core_scenarios.py::test_stale_and_impossible_results",
        ),
    ),
    Safeguard(
        "one result a message",
        "The same seq twice in one message is accepted once.",
        cut(f"{RESULTS}:take_group", "seq in seen", "False"),
        ("core/test_core_guards.py::test_a_result_told_twice_in_one_message_counts_once",),
    ),
    Safeguard(
        "attempt check on starts",
        "A late `started` does not mark the present attempt as begun.",
        cut(f"{RESULTS}:started", "grant.attempt != attempt", "False"),
        ("core/test_core_guards.py::test_a_late_start_of_an_attempt_given_back_is_ignored",),
    ),
    Safeguard(
        "holder check on starts",
        "Only the holder says that an attempt has begun.",
        cut(f"{RESULTS}:started", "grant.worker is not worker", "False"),
        ("core/test_core_guards.py::test_only_the_holder_starts_ends_or_gives_back_an_attempt",),
    ),
    Safeguard(
        "attempt check on released and given-up items",
        "What a worker gives back is the present attempt, not a later one.",
        cut(f"{RESULTS}:current", "grant.attempt == attempt", "True"),
        ("core/test_core_guards.py::test_a_late_release_of_an_attempt_given_back_is_ignored",),
    ),
    Safeguard(
        "holder check on released and given-up items",
        "A worker gives back, and keeps at Hello, only what it holds.",
        cut(f"{RESULTS}:current", "grant.worker is worker", "True"),
        ("core/test_core_guards.py::test_only_the_holder_starts_ends_or_gives_back_an_attempt",),
    ),
    Safeguard(
        "impossible log",
        "A result for a log that was never opened quarantines its worker.",
        never(f"{RESULTS}:impossible", "group.log >= c.next_log or group.log < 1"),
        ("core/test_core_guards_commit.py::test_a_result_for_a_log_that_was_never_opened_is_a_fault",),
    ),
    Safeguard(
        "impossible seq",
        "A result for an item that does not exist quarantines its worker.",
        cut(f"{RESULTS}:impossible", "if group.seq and (", "if False and ("),
        ("core/test_core_scenarios.py::test_stale_and_impossible_results",),
    ),
    Safeguard(
        "impossible attempt",
        "A result for an attempt that nobody was given quarantines its worker.",
        never(f"{RESULTS}:impossible", "attempt < 1 or (grant is not None and attempt > grant.attempt)"),
        ("core/test_core_guards.py::test_an_attempt_that_was_never_given_quarantines_and_costs_nobody_else",),
    ),
    Safeguard(
        "maximum of attempts",
        "An item that keeps failing fails for good.",
        cut(f"{RESULTS}:judge_failure", " or grant.failures + 1 >= spec.max_attempts", ""),
        ("core/test_core_scenarios.py::test_failures_retry_with_backoff_then_fail",),
    ),
    Safeguard(
        "failures that no retry can help",
        "They are not tried again.",
        cut(f"{RESULTS}:judge_failure", "not failure.retryable or ", ""),
        ("core/test_core_guards.py::test_a_failure_that_no_retry_can_help_is_final",),
    ),
    Safeguard(
        "dead letter",
        "An item that keeps killing workers ends.",
        never(f"{RESULTS}:loss_is_final", "grant.losses + 1 >= spec.max_worker_lost"),
        ("core/test_core_scenarios.py::test_a_killer_item_is_isolated_and_becomes_a_dead_letter",),
    ),
    Safeguard(
        "on_worker_lost = fail",
        "An item that must not run twice does not after its worker was lost.",
        never(f"{RESULTS}:loss_is_final", "spec.fail_on_worker_lost"),
        (
            "core/test_core_guards.py::test_what_must_not_run_twice_does_not_after_a_loss",
            "core/test_core_guards.py::test_what_must_not_run_twice_does_not_after_a_hello_without_it",
        ),
    ),
    Safeguard(
        "isolation of suspects",
        "An item that was lost twice runs alone in its engine, so that its neighbours live.",
        never(f"{CORE}dispatch:give", "history.losses >= c.settings.isolate_after_losses"),
        ("core/test_core_scenarios.py::test_a_killer_item_is_isolated_and_becomes_a_dead_letter",),
    ),
    Safeguard(
        "results behind a prune point",
        "They are skipped, and stay as evidence only.",
        never(f"{RESULTS}:judge", "lane.pruned_at >= 0 and seq > lane.pruned_at"),
        ("core/test_core_guards_commit.py::test_a_pruned_lane_skips_what_is_behind_its_prune_point",),
    ),
    Safeguard(
        "attempts end once",
        "An attempt that went with its predecessor is not ended again in the same step.",
        never(f"{CORE}attempts:end_attempt", "grant.log.flight.get(seq) is not grant"),
        ("core/test_core_guards.py::test_a_pipelined_pair_given_back_in_one_message_ends_once_each",),
    ),
    Safeguard(
        "assignment rows live as long as their attempts",
        "A restart finds every open attempt.",
        cut(f"{CORE}attempts:close", "if not batch.open:", "if True:"),
        (
            "core/test_core_guards.py::test_a_result_told_twice_in_one_message_counts_once",
            "core/test_core_scenarios_runs.py::test_pause_that_is_answered_in_time_can_be_resumed",
        ),
    ),
    Safeguard(
        "stale-session frames",
        "Frames of a worker's older stream are ignored after its new Hello.",
        cut(f"{WORKERS}:hello", "c.sessions.pop(worker.session, None)", "pass"),
        (
            "core/test_core_guards.py::test_frames_of_a_session_that_is_gone_are_ignored",
            "core/test_core_scenarios_children.py::test_children_spawned_again_while_the_first_are_compared_are_made_once",
        ),
        simulated=True,
    ),
    Safeguard(
        "session check on results",
        "Frames of a session that is not open are ignored.",
        cut(
            f"{WORKERS}:speaking",
            "worker = c.sessions.get(session)",
            "worker = c.sessions.get(session) or c.workers.get(session.split('-')[0])",
        ),
        (
            "core/test_core_guards.py::test_frames_of_a_session_that_is_gone_are_ignored",
            "core/test_core_scenarios_children.py::test_children_spawned_again_while_the_first_are_compared_are_made_once",
        ),
    ),
    Safeguard(
        "Hello re-pends what is not listed",
        "An assignment that never arrived runs all the same.",
        cut(f"{WORKERS}:reconcile", "if (grant.log.id, seq) not in listed and", "if False and"),
        (
            "core/test_core_guards.py::test_a_hello_with_an_old_attempt_does_not_keep_the_present_one",
            "core/test_core_guards.py::test_what_must_not_run_twice_does_not_after_a_hello_without_it",
        ),
    ),
    Safeguard(
        "Hello keeps only present attempts",
        "An attempt that was given to another is dropped when its first worker comes back.",
        cut(f"{WORKERS}:reconcile", "if grant is not None and grant.attempt == attempt:", "if grant is not None:"),
        ("core/test_core_guards.py::test_a_hello_with_an_old_attempt_does_not_keep_the_present_one",),
        covered_by="attempt check on released and given-up items",
    ),
    Safeguard(
        "Hello asks for results that are not durable",
        "A result that was lost with the stream is sent again.",
        cut(f"{WORKERS}:unacknowledged", "put = resend", "put = accepted"),
        ("core/test_core_scenarios.py::test_restart_keeps_attempts_and_reconciles",),
        simulated=True,
    ),
    Safeguard(
        "a started item that Hello does not list",
        "on_worker_lost = fail holds also where the same worker comes back without it.",
        cut(f"{WORKERS}:not_held", "if spec.fail_on_worker_lost and", "if False and"),
        ("core/test_core_guards.py::test_what_must_not_run_twice_does_not_after_a_hello_without_it",),
    ),
    Safeguard(
        "a failed worker's items are pending again",
        "The work of a dead worker runs elsewhere.",
        cut(f"{WORKERS}:failed", 'take_back(c, worker, "worker_failed", lost=True)', "0"),
        (
            "core/test_core_guards.py::test_what_must_not_run_twice_does_not_after_a_loss",
            "core/test_core_scenarios.py::test_a_silent_worker_fails_once_and_its_items_run_elsewhere",
        ),
        simulated=True,
    ),
    Safeguard(
        "a leaving worker's items are pending again",
        "What a worker leaves behind at Goodbye runs elsewhere.",
        cut(f"{WORKERS}:goodbye", 'take_back(c, worker, "goodbye", lost=False, spare=quarantine.may_run)', "pass"),
        ("core/test_core_scenarios.py::test_a_killer_item_is_isolated_and_becomes_a_dead_letter",),
    ),
    Safeguard(
        "a quarantined worker's items are pending again",
        "A protocol fault costs its worker only.",
        cut(
            f"{QUARANTINE}:quarantine",
            'workers.take_back(c, worker, "quarantined", lost=True, spare=exclusive)',
            "pass",
        ),
        ("core/test_core_guards.py::test_an_attempt_that_was_never_given_quarantines_and_costs_nobody_else",),
    ),
    Safeguard(
        "quarantine is for good",
        "A worker that broke the protocol gets no more work.",
        never(f"{WORKERS}:hello", "worker.state in (WorkerState.QUARANTINED, WorkerState.GONE)"),
        ("core/test_core_scenarios.py::test_stale_and_impossible_results",),
    ),
    Safeguard(
        "quarantine outlives silence",
        "A worker that broke the protocol is not forgotten while it keeps silent.",
        cut(f"{WORKERS}:scan", "worker.state is not WorkerState.QUARANTINED", "True"),
        ("core/test_core_quarantine.py::test_quarantine_is_not_forgotten_when_the_worker_keeps_silent",),
    ),
    Safeguard(
        "quarantines remembered are bounded",
        "A host that buys incarnations only to be quarantined does not fill the memory.",
        cut(f"{CORE}quarantine:quarantine", "del c.workers[oldest]", "pass"),
        ("core/test_core_quarantine.py::test_only_the_newest_quarantines_are_remembered",),
    ),
    Safeguard(
        "Hello of another host",
        "A host cannot take over the session of another's worker.",
        never(f"{WORKERS}:hello", "elsewhere(worker, event.host_id)"),
        ("core/test_core_quarantine.py::test_a_worker_is_heard_on_its_own_host_only",),
    ),
    Safeguard(
        "beat of another host",
        "A host cannot keep another's dead worker alive.",
        cut(f"{WORKERS}:beat", " or elsewhere(worker, event.host_id)", ""),
        ("core/test_core_quarantine.py::test_a_worker_is_heard_on_its_own_host_only",),
    ),
    Safeguard(
        "failure timeout",
        "A worker is failed only after its whole timeout, when it has long fenced itself.",
        cut(
            f"{WORKERS}:scan",
            "late <= settings.coordinator_failure_timeout or late <= settings.clock_skew_budget",
            "late <= settings.clock_skew_budget",
        ),
        (
            "core/test_core_guards.py::test_a_beat_that_has_arrived_is_read_before_the_deadline_is_looked_at",
            "core/test_core_guards.py::test_a_beat_handled_late_does_not_shorten_a_deadline",
        ),
    ),
    Safeguard(
        "workers that left are forgotten",
        "What is taken back from a worker that left does not put it on the list of those that want work.",
        cut(f"{CORE}attempts:close", "if worker.session:", "if True:"),
        ("core/test_core_memory.py::test_workers_leave_memory_when_they_are_long_gone",),
        simulated=True,
    ),
    Safeguard(
        "own stalls extend deadlines",
        "A coordinator that was stopped does not fail its workers for its own silence.",
        never(f"{WORKERS}:allow_for_stall", "stall > 0"),
        ("core/test_core_guards.py::test_a_coordinator_that_was_stopped_fails_nobody",),
    ),
    Safeguard(
        "events before deadlines",
        "What has arrived is read before anybody is declared silent.",
        (
            Edit(f"{CORE}core:Core.handle", "        workers.scan(c)\n", ""),
            Edit(
                f"{CORE}core:Core.handle",
                "        for event in events:\n",
                "        workers.scan(c)\n        for event in events:\n",
            ),
        ),
        ("core/test_core_guards.py::test_a_beat_that_has_arrived_is_read_before_the_deadline_is_looked_at",),
    ),
    Safeguard(
        "deadlines never move back",
        "A beat that was read earlier and handled later does not shorten a deadline.",
        cut(
            f"{WORKERS}:heard",
            "max(worker.due_at, read_at + 2 * c.settings.heartbeat_interval)",
            "read_at + 2 * c.settings.heartbeat_interval",
        ),
        ("core/test_core_guards.py::test_a_beat_handled_late_does_not_shorten_a_deadline",),
    ),
    Safeguard(
        "one worker_failed an incarnation",
        "A worker that comes and goes is reported once.",
        cut(f"{WORKERS}:failed", "if not worker.told_failed:", "if True:"),
        ("core/test_core_guards.py::test_a_worker_that_fails_again_is_reported_once",),
    ),
    Safeguard(
        "timeout backstop",
        "An attempt whose worker does not enforce its timeout ends.",
        cut(f"{QUARANTINE}:overdue", "elif c.now.mono - began > limit and", "elif False and"),
        ("core/test_core_guards_commit.py::test_an_attempt_whose_worker_does_not_enforce_its_timeout_ends",),
    ),
    Safeguard(
        "pause is told again at Hello",
        "A worker that was away when a run was paused stops too.",
        cut(f"{WORKERS}:hello", "elif run.pausing_until_ms:", "elif False:"),
        ("core/test_core_guards.py::test_a_worker_that_was_away_hears_of_the_pause",),
    ),
    Safeguard(
        "only unstarted attempts count as given back",
        "A lost attempt that had begun counts as a loss of its item.",
        cut(f"{WORKERS}:take_back", "if lost and began:", "if False:"),
        (
            "core/test_core_guards.py::test_what_must_not_run_twice_does_not_after_a_loss",
            "core/test_core_scenarios.py::test_a_silent_worker_fails_once_and_its_items_run_elsewhere",
        ),
    ),
    Safeguard(
        "nothing is sent before Welcome",
        "A worker that says Hello without what a pipelined attempt stands on is not sent `cancel` before its Welcome.",
        (
            Edit(f"{WORKERS}:reconcile", "    c.step.sends.append(answer)  #", "    #"),
            Edit(
                f"{WORKERS}:reconcile",
                "    tell_reconciled(c, worker, answer, missing)\n",
                "    c.step.sends.append(answer)\n    tell_reconciled(c, worker, answer, missing)\n",
            ),
        ),
        ("core/test_core_guards.py::test_a_successor_whose_predecessor_never_arrived_is_cancelled_after_the_welcome",),
    ),
    Safeguard(
        "a drain is told until it is heard",
        "A worker that was cut off when it was told to drain does not stay without work for ever.",
        cut(f"{WORKERS}:beat", "elif worker.state is WorkerState.DRAINING:", "elif False:"),
        ("core/test_core_guards_dispatch.py::test_a_worker_that_did_not_hear_that_it_must_drain_is_told_again",),
    ),
    Safeguard(
        "headers before writes",
        "A refused stream ends for its worker too: grpc takes no status behind a cancelled first write.",
        cut(
            "rollout_coordinator.work_service:WorkService.Stream",
            "            await context.send_initial_metadata(())\n",
            "",
        ),
        (
            "integration/test_coordinator_hostile.py::"
            "test_a_status_follows_headers_that_no_cancelled_write_had_to_bring",
        ),
        slow=True,
    ),
)
