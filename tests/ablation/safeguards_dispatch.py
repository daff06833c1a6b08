"""Who gets what, and what may not run yet: dispatch, chains, the window over the ledger."""

from __future__ import annotations

from removal import Edit
from safeguard import CORE, Safeguard, cut, never

DISPATCH, WINDOW, CHAINS, ROOM = f"{CORE}dispatch", f"{CORE}window", f"{CORE}chains", f"{CORE}room"

SAFEGUARDS = (
    Safeguard(
        "only running runs dispatch",
        "A paused, interrupted or ended run hands out nothing.",
        cut(f"{DISPATCH}:dispatch", "r.state is RunState.RUNNING and ", ""),
        ("core/test_core_scenarios_runs.py::test_pause_resume_interrupt_continue_kill_delete",),
    ),
    Safeguard(
        "only ready workers get work",
        "A worker that drains gets nothing new.",
        cut(f"{DISPATCH}:dispatch", " and w.state is WorkerState.READY", ""),
        ("core/test_core_guards_dispatch.py::test_a_draining_worker_gets_nothing_though_it_tells_credit",),
    ),
    Safeguard(
        "fenced workers get no work",
        "Work does not wait at a worker that starts nothing.",
        cut(f"{DISPATCH}:dispatch", " and not w.fenced", ""),
        ("core/test_core_guards_dispatch.py::test_a_fenced_worker_gets_nothing",),
    ),
    Safeguard(
        "only workers with a stream get work",
        "Nothing is assigned to a worker that cannot hear of it.",
        cut(f"{DISPATCH}:dispatch", "if w.session and", "if"),
        ("core/test_core_guards_dispatch.py::test_nothing_is_assigned_where_no_stream_is_open",),
    ),
    Safeguard(
        "exclusive is not pipelined",
        "An item that may have to be taken back from its worker at once is not exclusive.",
        cut(f"{CHAINS}:may_go", " or spec.exclusive", ""),
        ("core/test_core_survivors.py::test_an_exclusive_item_of_a_chain_that_is_stopping_holds_its_chain",),
    ),
    Safeguard(
        "credit in items",
        "A worker is never given more than it asked for.",
        (
            Edit(f"{ROOM}:room", "return worker.credit.items - held(worker)", "return UNLIMITED"),
            Edit(f"{ROOM}:room", "return own - worker.holds.get(run.id, 0)", "return UNLIMITED"),
        ),
        (
            "core/test_core_scenarios_dispatch.py::test_runs_share_by_priority_also_when_each_has_credit_of_its_own",
            "core/test_core_guards.py::test_killed_work_stops_and_its_late_results_count_for_nothing",
        ),
    ),
    Safeguard(
        "who is full of one run is remembered",
        "A worker that is full of one run, and has credit for others, gets what is submitted next at once.",
        cut(f"{DISPATCH}:rest", "if not has_enough(worker):", "if False:"),
        ("core/test_many_runs.py::test_a_worker_that_has_enough_of_one_run_takes_of_the_next",),
    ),
    Safeguard(
        "other items wake who rests",
        "The same, when they are pending.",
        cut(f"{DISPATCH}:dispatch", "s.heap and s not in c.rested_for", "False"),
        (
            "core/test_many_runs.py::test_a_worker_that_has_enough_of_one_run_takes_of_the_next",
            "core/test_many_workers.py::test_workers_that_are_full_of_one_run_are_not_asked_with_every_step",
        ),
    ),
    Safeguard(
        "what is all taken wakes who rests",
        "A worker that took the last of a run, and has room for more of it, is asked again when there is more.",
        cut(f"{CORE}turn:Turn._look", "if self._shapes is not None:", "if False:"),
        ("core/test_many_runs.py::test_who_takes_the_last_of_a_run_and_rests_is_asked_for_more_of_it",),
    ),
    Safeguard(
        "credit in bytes",
        "Large payloads do not pile up at a worker.",
        (
            Edit(f"{ROOM}:room", "if worker.bytes >= worker.credit.bytes:", "if False:"),
            Edit(f"{DISPATCH}:fits_bytes", " and worker.bytes + size <= worker.credit.bytes", ""),
            Edit(
                f"{DISPATCH}:take",
                "min(frame.bytes_left, frame.worker.credit.bytes - frame.worker.bytes)",
                "frame.bytes_left",
            ),
        ),
        ("core/test_core_guards_dispatch.py::test_payloads_beyond_a_workers_bytes_wait",),
    ),
    Safeguard(
        "bytes of a frame",
        "An assignment stays below the limit of the wire.",
        (
            Edit(f"{DISPATCH}:fits_bytes", "size <= frame.bytes_left and ", ""),
            Edit(
                f"{DISPATCH}:take",
                "min(frame.bytes_left, frame.worker.credit.bytes - frame.worker.bytes)",
                "frame.worker.credit.bytes - frame.worker.bytes",
            ),
            Edit(f"{DISPATCH}:feed", " and frame.bytes_left > 0", ""),
            Edit(f"{DISPATCH}:take_from_run", " and frame.bytes_left > 0", ""),
        ),
        ("core/test_core_guards_dispatch.py::test_an_assignment_stays_below_the_limit_of_a_frame",),
    ),
    Safeguard(
        "cap of a run",
        "A run never has more in flight than it says.",
        never(f"{DISPATCH}:feed", "run.spec.max_in_flight"),
        ("core/test_core_scenarios_dispatch.py::test_lane_caps_and_run_cap",),
    ),
    Safeguard(
        "cap of a lane",
        "A lane never has more in flight than it says.",
        never(f"{DISPATCH}:allowed", "lane.cap"),
        ("core/test_core_scenarios_dispatch.py::test_lane_caps_and_run_cap",),
    ),
    Safeguard(
        "strict resources",
        "A worker's gpus, cpus and memory are not overcommitted.",
        (
            Edit(f"{DISPATCH}:take_from_run", "(shape.strict and strict_room(worker, shape) <= 0)", "False"),
            Edit(
                f"{DISPATCH}:take_from_run",
                "        if best.strict:\n            most",
                "        if False:\n            most",
            ),
        ),
        ("core/test_core_guards_dispatch.py::test_strict_resources_are_not_overcommitted",),
    ),
    Safeguard(
        "requirements are known by what they say",
        "What a worker fits is not taken from a run that is forgotten.",
        (
            Edit(f"{ROOM}:fits", "worker.fits.get(shape.key)", "worker.fits.get(id(shape))"),
            Edit(f"{ROOM}:fits", "worker.fits[shape.key] =", "worker.fits[id(shape)] ="),
        ),
        ("core/test_core_memory.py::test_what_a_worker_fits_is_not_taken_from_a_run_that_is_forgotten",),
    ),
    Safeguard(
        "required executor",
        "An item goes only to a worker that has its executor.",
        cut(f"{ROOM}:fits", "(not have.executors or shape.workload in have.executors)\n            and ", ""),
        ("core/test_core_guards_dispatch.py::test_an_item_waits_for_a_worker_that_has_what_it_requires[executor]",),
    ),
    Safeguard(
        "required roles",
        "An item goes only to a worker with its roles.",
        cut(f"{ROOM}:fits", "and shape.roles.issubset(have.roles)", ""),
        (
            "core/test_core_guards_dispatch.py::test_an_item_waits_for_a_worker_that_has_what_it_requires[roles]",
            "core/test_core_guards_dispatch.py::test_what_a_thief_may_not_have_is_not_asked_for[fits]",
        ),
    ),
    Safeguard(
        "required labels",
        "An item goes only to a worker with its labels.",
        cut(f"{ROOM}:fits", "and all(labels.get(name) == value for name, value in shape.labels)", ""),
        ("core/test_core_guards_dispatch.py::test_an_item_waits_for_a_worker_that_has_what_it_requires[labels]",),
    ),
    Safeguard(
        "required plugin",
        "An item goes only to a worker with its plugin.",
        cut(f"{ROOM}:fits", "and (not shape.plugin or shape.plugin in have.plugins)", ""),
        ("core/test_core_guards_dispatch.py::test_an_item_waits_for_a_worker_that_has_what_it_requires[plugin]",),
    ),
    Safeguard(
        "not_before",
        "An item does not run before its time.",
        never(f"{DISPATCH}:allowed", "spec.not_before_ms > c.now.wall_ms"),
        ("core/test_core_guards_dispatch.py::test_an_item_waits_for_its_time",),
    ),
    Safeguard(
        "backoff of a retry",
        "A failed attempt is not tried again at once.",
        cut(f"{CORE}attempts:repend", "if history.not_before > c.now.mono:", "if False:"),
        (
            "core/test_core_guards_dispatch.py::test_a_backoff_outlives_the_leader",
            "core/test_core_guards_dispatch.py::test_a_chain_waits_for_its_failed_item_and_goes_on_in_order",
        ),
    ),
    Safeguard(
        "backoff of a retry, after a restart",
        "A new leader keeps to the backoff that the ledger knows.",
        cut(f"{WINDOW}:admit", "elif history.not_before > c.now.mono:", "elif False:"),
        ("core/test_core_guards_dispatch.py::test_a_backoff_outlives_the_leader",),
    ),
    Safeguard(
        "retries by the monotonic clock",
        "A wall clock that jumps while a leader lives delays no retry, and hurries none.",
        (
            Edit(f"{CORE}attempts:repend", "history.not_before > c.now.mono", "history.not_before > c.now.wall_ms"),
            Edit(
                f"{CORE}attempts:end_attempt",
                "c.now.mono + delay_ms / 1000",
                "c.now.wall_ms + delay_ms",
            ),
            Edit(f"{WINDOW}:admit", "history.not_before > c.now.mono", "history.not_before > c.now.wall_ms"),
            Edit(f"{WINDOW}:fire_timers", "c.retries[0][0] <= c.now.mono", "c.retries[0][0] <= c.now.wall_ms"),
        ),
        (
            "core/test_core_clock.py::test_a_clock_that_goes_back_delays_no_retry",
            "sim/test_clocks.py::test_clocks_that_jump_a_day_and_come_back_hold_no_run_up",
        ),
    ),
    Safeguard(
        "a retry waits no longer than its delay was",
        "A wall clock that jumped before a leader was replaced does not hold an item up.",
        cut(f"{WINDOW}:not_before", "min(rest, longest)", "rest"),
        (
            "core/test_core_clock.py::test_a_new_leader_waits_no_longer_than_the_delay_was",
            "core/test_core_clock.py::test_nor_than_the_cap",
            "sim/test_clocks.py::test_clocks_that_jump_a_day_and_come_back_hold_no_run_up",
        ),
    ),
    Safeguard(
        "attempt numbers grow",
        "Two attempts of an item are told apart, across restarts too.",
        cut(f"{DISPATCH}:give", "history.attempts + 1", "1"),
        (
            "core/test_core_guards.py::test_a_late_result_of_an_attempt_given_back_is_stale",
            "core/test_core_guards.py::test_a_late_start_of_an_attempt_given_back_is_ignored",
        ),
        simulated=True,
    ),
    Safeguard(
        "commit horizon",
        "A straggler at seq 0 does not make memory grow with the run.",
        cut(f"{DISPATCH}:allowed", "if log.run.tracked and log.parent is None:", "if False:"),
        ("core/test_core_guards_dispatch.py::test_dispatch_does_not_run_far_ahead_of_a_straggler",),
    ),
    Safeguard(
        "bounded window",
        "Memory does not grow with what is pending.",
        cut(
            f"{WINDOW}:room",
            "0 if log.window_bytes >= c.settings.window_bytes else c.settings.window_items - log.window",
            "1 << 40",
        ),
        (
            "core/test_core_scenarios.py::test_the_window_is_bounded",
            "core/test_core_guards_dispatch.py::test_rows_submitted_while_the_rest_was_read_are_not_forgotten",
        ),
    ),
    Safeguard(
        "a chain runs one at a time",
        "An item of a chain waits while another of it is in flight.",
        never(f"{CHAINS}:may_go", "chain.flying"),
        (
            "core/test_core_guards_dispatch.py::test_a_pipelined_item_goes_only_to_the_worker_of_its_predecessor",
            "core/test_core_guards_dispatch.py::test_an_adopted_attempt_keeps_its_chain_busy",
        ),
    ),
    Safeguard(
        "a pipelined item follows its predecessor",
        "It goes to the worker that runs its predecessor, and only there.",
        cut(f"{CHAINS}:may_go", ' and grant.worker is worker else "aside"', ' else "aside"'),
        ("core/test_core_guards_dispatch.py::test_a_pipelined_item_goes_only_to_the_worker_of_its_predecessor",),
    ),
    Safeguard(
        "at most one ahead in a pipelined chain",
        "k+2 does not run before k is committed.",
        cut(f"{CHAINS}:may_go", " or len(chain.flying) > 1", ""),
        ("core/test_core_guards_commit.py::test_a_pipelined_chain_runs_one_ahead_and_ends_with_what_it_stands_on",),
    ),
    Safeguard(
        "a chain runs in order",
        "A later item does not overtake an earlier one that is pending again.",
        never(f"{CHAINS}:may_go", "next_open(log, chain) != queue.head()"),
        ("core/test_core_guards_dispatch.py::test_a_chain_waits_for_its_failed_item_and_goes_on_in_order",),
    ),
    Safeguard(
        "a chain's last result after a restart",
        "The next item gets its predecessor's result from the ledger.",
        (Edit(f"{CHAINS}:may_go", "    if not chain.known:\n        look_back", "    if False:\n        look_back"),),
        ("core/test_core_guards_dispatch.py::test_a_chain_gets_its_predecessors_result_from_the_ledger",),
    ),
    Safeguard(
        "a pipelined result stands on a final one",
        "k+1 does not commit before k, nor on a k that changed.",
        cut(f"{CORE}results:take_singly", "grant.pred is not None and not chains.stands(log, grant)", "False"),
        ("core/test_core_guards_dispatch.py::test_a_pipelined_result_before_its_predecessors_is_dropped",),
    ),
    Safeguard(
        "dependents are dropped",
        "A pipelined attempt ends with the attempt that it stands on.",
        cut(f"{CHAINS}:drop_dependents", "if other.pred == (seq, grant.attempt):", "if False:"),
        ("core/test_core_guards_commit.py::test_a_pipelined_chain_runs_one_ahead_and_ends_with_what_it_stands_on",),
    ),
    Safeguard(
        "rows read back: already in flight",
        "An item that is in flight is not handed out again by a read of the ledger.",
        cut(f"{WINDOW}:loaded", "or seq in log.flight or", "or"),
        (
            "core/test_core_guards_dispatch.py::test_what_is_known_from_the_ledger_only_is_not_asked_back",
            "core/test_core_scenarios_dispatch.py::test_a_chain_goes_in_order_with_its_predecessors_result",
        ),
        simulated=True,
    ),
    Safeguard(
        "rows read back: already accepted",
        "An item whose result came while it was read is not run again.",
        cut(f"{WINDOW}:loaded", " or is_accepted(log, seq):", ":"),
        ("core/test_core_guards_dispatch.py::test_a_row_whose_result_came_while_it_was_read_does_not_run_again",),
    ),
    Safeguard(
        "rows read back: before the window's end",
        "A row that is in memory already is not put there twice.",
        cut(f"{WINDOW}:loaded", "seq < log.tail or ", ""),
        ("core/test_core_guards_commit.py::test_a_read_for_a_run_that_was_killed_and_continued_counts_for_nothing",),
        covered_by="answers of an older read",
    ),
    Safeguard(
        "rows read back: out of turn",
        "A row that was loaded by itself is not loaded again with the page that holds it.",
        cut(f"{WINDOW}:loaded", "seq in log.flight or seq in log.ahead", "seq in log.flight"),
        ("core/test_core_guards_dispatch.py::test_a_row_read_by_itself_is_not_taken_again_from_its_page",),
    ),
    Safeguard(
        "retries read back: already in flight or accepted",
        "A retry whose item moved on meanwhile is dropped.",
        cut(
            f"{WINDOW}:loaded",
            "if history is not None and item.seq not in log.flight and not is_accepted(log, item.seq):",
            "if history is not None:",
        ),
        ("core/test_core_guards_dispatch.py::test_a_row_read_by_itself_is_not_taken_again_from_its_page",),
        covered_by="rows read back: out of turn",
    ),
    Safeguard(
        "answers of an older read",
        "Only the read under way fills the window.",
        never(f"{WINDOW}:loaded", "log.loading != event.load_id"),
        (
            "core/test_core_guards_commit.py::test_a_read_for_a_run_that_was_killed_and_continued_counts_for_nothing[after]",
        ),
    ),
    Safeguard(
        "the end of a read log",
        "Rows that were submitted while the log was read are not taken for read.",
        cut(
            f"{WINDOW}:loaded",
            "max(log.tail, note.submitted, event.items[-1].seq + 1 if event.items else 0)",
            "log.submitted",
        ),
        (
            "core/test_core_guards_dispatch.py::test_rows_submitted_while_the_rest_was_read_are_not_forgotten",
            "core/test_core_guards_dispatch.py::test_a_row_read_by_itself_is_not_taken_again_from_its_page",
        ),
    ),
    Safeguard(
        "fresh rows behind unread ones",
        "New rows go to the window only where everything before them is there.",
        cut(f"{CORE}submit:append", "log.tail == first and ", ""),
        ("core/test_core_guards_dispatch.py::test_fresh_rows_do_not_pass_rows_that_are_on_disk_only",),
    ),
    Safeguard(
        "fresh rows while a read is under way",
        "A row is not both put into the window and read back.",
        cut(f"{CORE}submit:append", "not log.loading and ", ""),
        ("core/test_core_guards_dispatch.py::test_fresh_rows_do_not_pass_rows_that_are_on_disk_only",),
        covered_by="fresh rows behind unread ones",
    ),
    Safeguard(
        "closed logs take nothing into the window",
        "What is read back for a run that has ended does not run.",
        never(f"{WINDOW}:place", "log.closed"),
        ("core/test_core_guards_commit.py::test_a_read_for_a_run_that_was_killed_and_continued_counts_for_nothing",),
        covered_by="answers of an older read",
    ),
    Safeguard(
        "closed logs take no retry into the window",
        "A retry of a run that has ended does not run.",
        never(f"{WINDOW}:admit", "log.closed"),
        ("core/test_core_guards_commit.py::test_a_read_for_a_run_that_was_killed_and_continued_counts_for_nothing",),
        covered_by="a run that ends drops its window",
    ),
    Safeguard(
        "those that have least come first",
        "What comes a few at a time does not fill one worker while others idle.",
        cut(f"{DISPATCH}:dispatch", "workers.sort(key=load)", "pass"),
        ("core/test_many_workers.py::test_what_comes_one_by_one_goes_to_whoever_has_least",),
    ),
    Safeguard(
        "more at once for those that have much",
        "Hundreds of workers with work in hand are not given each row by itself.",
        cut(f"{DISPATCH}:feed_all", ", load(worker) // 2)", ")"),
        ("core/test_many_workers.py::test_those_that_have_much_are_given_more_at_once",),
    ),
)
